"""The table of a sweep, or of a folder of runs, as printed: at its end, and at any time before (`trainapp leaderboard
DIR`).

Ranked by the best value of the objective, whose checkpoint each run keeps. Where `train.seed` was swept, runs that
differ in nothing else are one row, with mean and standard deviation.
"""

import atexit
import contextlib
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.config.excludes import NO_BEST, SET_OBJECTIVE
from trainapp.errors import UserError
from trainapp.files import CHECKPOINTS, COMMAND, CONFIG, HYDRA, PLAN, checkpoint_name, json_object, shown
from trainapp.report import page
from trainapp.sweep import samplers, tables
from trainapp.sweep.journal import JOURNAL, Journal, common_objective
from trainapp.sweep.rows import NOT_BEGUN, SEED, Row, merge_seeds, objective_of, rank, read_rows
from trainapp.units import listed

TABLE = "leaderboard.csv"
MARKDOWN = "leaderboard.md"
_FEWEST_CHARACTERS = 20  # for the settings beside the other columns; with fewer they are lines of their own
_INDENT_BELOW = 4  # of those lines
_OWN_SWEEPER = "hydra_plugins.trainapp_sweeper.TrainappSweeper"


def show(folder: Path) -> None:
    """Print the table of a sweep or of a folder of runs, and write it to `leaderboard.csv` and `leaderboard.md`.

    Raises UserError for a folder without runs.
    """
    rows = read_rows(folder)
    plans = [row for row in rows if (row.folder / PLAN).exists()]
    if plans:
        _print_table(*tables.table_of_plans(plans))

    # All runs, and means over their seeds.
    runs = [row for row in rows if row not in plans]
    begun = [row for row in runs if row.state != NOT_BEGUN]
    ranked = rank(begun)
    if not ranked:
        return
    header, cells = tables.table_with_settings(ranked)
    _print_table(header, cells)
    merged = rank(merge_seeds(runs))
    if merged:
        print()
        _print_table(*tables.table_with_settings(merged))

    # What the table does not show.
    if (folder / JOURNAL).exists():
        _print_importance(Journal(folder, writes=False))
    _print_notes(runs, ranked)

    with contextlib.suppress(OSError):  # another user's folder
        tables.write_csv(ranked, folder / TABLE)
        tables.write_markdown(header, cells, folder / MARKDOWN)
        if not (folder / HYDRA).exists():  # that of a single run has more
            tables.write_page(folder, rows)
    _print_commands(ranked)


def best_text(rows: Sequence[Row]) -> str:
    """Return the best value so far, for a line of progress; empty if there is none."""
    ranked = rank(rows)
    if not ranked or ranked[0].best is None:
        return ""
    best = ranked[0]
    return f"{best.facts['metric']} {best.best:.4g} (job {best.name})"


def _print_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print columns of equal width, within the terminal's: what is the same in all rows is one line above, and the last
    column is wrapped, beside the others or below.
    """
    terminal_width = shutil.get_terminal_size((80, 24)).columns

    # What is the same in all rows.
    other_columns = [line[:-1] for line in cells]
    note, names, rows = page.without_constant(header[:-1], other_columns, first=3)
    if note:
        print(f"all: {note}")

    # The header is the first line; an empty last column has none.
    lines = [names, *rows]
    last_column = [line[-1] for line in cells]
    last_header = header[-1] if any(last_column) else ""
    last_column.insert(0, last_header)

    # Where the last column begins.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    indent = sum(widths) + 2 * len(widths)
    is_beside = terminal_width - indent >= _FEWEST_CHARACTERS
    if not is_beside:
        indent = _INDENT_BELOW

    for line, last_cell in zip(lines, last_column, strict=True):
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        wrapped = textwrap.wrap(last_cell, terminal_width - indent, break_on_hyphens=False)
        if is_beside and wrapped:
            padded.append(wrapped.pop(0))
        print("  ".join(padded).rstrip(), flush=True)
        for text in wrapped:
            print(" " * indent + text, flush=True)


def _print_importance(journal: Journal) -> None:
    """Print which settings matter, if Optuna is installed."""
    _, direction = common_objective(journal.facts) or ("", "")
    shares = samplers.importances(journal.space, journal.trials, direction)
    shares.pop(SEED, None)
    if len(shares) < 2:
        return
    texts = []
    for key, share in shares.items():
        setting = key.lstrip("+~")
        texts.append(f"{setting} {share:.2f}")
    print(f"importance: {', '.join(texts)}")


def _print_notes(runs: Sequence[Row], ranked: Sequence[Row]) -> None:
    """Print what has not begun, what has failed, and why jobs are not ranked.

    Args:
        runs: all.
        ranked: those that have begun, ranked.
    """
    not_begun = [row.settings_text for row in runs if not row.name]
    if not_begun:
        print(f"{len(not_begun)} jobs have not begun: {listed(not_begun)}")

    # Each error once, with the jobs that have it.
    names_by_error: dict[str, list[str]] = {}
    for row in ranked:
        if row.error:
            names_by_error.setdefault(row.error, []).append(row.name)
    for error, names in names_by_error.items():
        print(f"{listed(names, 9)}: {error}")

    # Why the table has no ranks.
    has_values = any(row.best is not None for row in ranked)
    if has_values and objective_of(ranked) is None:
        print("not ranked: their objectives differ")
    without_best = [row.name for row in ranked if row.has_no_best]
    if without_best:
        print(f"not ranked: {listed(without_best)}: {NO_BEST}; {SET_OBJECTIVE}")


def _print_commands(ranked: Sequence[Row]) -> None:
    """Print the commands that train the best run longer, evaluate and export it."""
    best = ranked[0]
    if objective_of(ranked) is None or not (best.folder / COMMAND).exists():
        return
    text = f"best: job {best.name}, {best.facts['metric']} {best.best:.6g}"
    if best.settings:
        text += f"; {best.settings_text}"
    print(text)
    config = yaml.safe_load((best.folder / CONFIG).read_text())
    _print_longer_command(best, config)

    best_step = best.facts.get("best_step") or 0
    checkpoint = best.folder / CHECKPOINTS / checkpoint_name(best_step)
    if not checkpoint.exists():
        return

    # The run's flags and packages decide what is composed and which classes may be built.
    arguments_of_run = json_object(best.folder / COMMAND)["arguments"]
    flags = [shlex.quote(argument) for argument in arguments_of_run if argument.startswith("--")]
    packages = config.get("user_packages")
    for title, mode in (("evaluate it", "eval"), ("export it", "export")):
        arguments = [*flags, f"mode={mode}", f"checkpointing.resume={shown(checkpoint)}"]
        if packages:
            package_list = ",".join(packages)
            arguments.append(f"'user_packages=[{package_list}]'")
        print(f"  {title:<16}  python -m trainapp {' '.join(arguments)}")


def _print_longer_command(best: Row, config: dict[str, Any]) -> None:
    """Print the command that trains the best run longer, if it has ended by its number of steps or epochs."""
    ended_by = best.facts.get("ended") or ""  # such as train.max_steps=100
    setting = ended_by.partition("=")[0].removeprefix("train.")
    if setting not in ("max_steps", "max_epochs"):
        return
    other_setting = "max_epochs" if setting == "max_steps" else "max_steps"
    command = f"python -m trainapp continue {shown(best.folder)} train.{setting}=N"
    settings_of_train = config.get("train", {})
    if settings_of_train.get(other_setting) is not None:  # else it would end the run as before
        command += f" train.{other_setting}=null"
    print(f"  train it longer   {command}")


class TableAtEnd(Callback):
    """Prints the table of a sweep by another of Hydra's sweepers; the program's own prints it itself.

    It does so through `atexit`, since Hydra skips `on_multirun_end` after a failed job or a signal.
    """

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Print the table of this sweep when the process ends. Called by Hydra."""
        if config.hydra.sweeper._target_ == _OWN_SWEEPER:
            return
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        if folder is not None:
            atexit.register(_show_table, Path(str(folder)).resolve())


def _show_table(folder: Path) -> None:
    """Print the table, if any job has begun."""
    with contextlib.suppress(UserError):
        show(folder)
