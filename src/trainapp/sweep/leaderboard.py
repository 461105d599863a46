"""The table of a sweep, or of a folder of runs: computed, and written to files, at the end of a sweep and at any time
before (`trainapp leaderboard DIR`). `terminal.py` prints it.

Ranked by the best value of the objective, whose checkpoint each run keeps. Where `train.seed` was swept, runs that
differ in nothing else are one row, with mean and standard deviation.
"""

import atexit
import contextlib
import csv
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.errors import UserError
from trainapp.files import HYDRA, PLAN, atomic_write, json_object
from trainapp.report import page
from trainapp.report.page import BLANK, memory_text, number_text, seconds_text
from trainapp.sweep import terminal
from trainapp.sweep.journal import JOURNAL, Journal
from trainapp.sweep.outcome import FACTS
from trainapp.sweep.rows import NOT_BEGUN, Row, merge_seeds, objective_of, rank, read_rows

TABLE = "leaderboard.csv"
MARKDOWN = "leaderboard.md"
_OWN_SWEEPER = "hydra_plugins.trainapp_sweeper.TrainappSweeper"
Header = list[str]
Cells = list[list[Any]]


def show(folder: Path) -> None:
    """Print the table of a sweep or of a folder of runs, and write it to `leaderboard.csv` and `leaderboard.md`.

    Raises UserError for a folder without runs.
    """
    rows = read_rows(folder)
    plans = [row for row in rows if (row.folder / PLAN).exists()]
    if plans:
        terminal.print_table(*table_of_plans(plans))

    # All runs, and means over their seeds.
    runs = [row for row in rows if row not in plans]
    begun = [row for row in runs if row.state != NOT_BEGUN]
    ranked = rank(begun)
    if not ranked:
        return
    header, cells = table_with_settings(ranked)
    terminal.print_table(header, cells)
    merged = rank(merge_seeds(runs))
    if merged:
        print()
        terminal.print_table(*table_with_settings(merged))

    # What the table does not show.
    if (folder / JOURNAL).exists():
        terminal.print_importance(Journal(folder, writes=False))
    terminal.print_notes(runs, ranked)

    with contextlib.suppress(OSError):  # another user's folder
        write_csv(ranked, folder / TABLE)
        write_markdown(header, cells, folder / MARKDOWN)
        if not (folder / HYDRA).exists():  # that of a single run has more
            write_page(folder, rows)
    terminal.print_commands(ranked)


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


# Header and cells


def setting_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the settings in which the rows differ."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.settings)
    return list(names)


def table_of(rows: Sequence[Row], names: Sequence[str]) -> tuple[Header, Cells]:
    """Return header and cells of ranked rows, as text, with a column for each of these settings."""
    objective = objective_of(rows)
    best_header = "best"
    if objective is not None:
        metric, direction = objective
        best_header = f"{metric} ({direction})"
    header = ["#", "job", best_header, "last", *names, "steps", "time", "micro", "OOMs", "memory", "state"]
    cells: Cells = []
    for rank_number, row in enumerate(rows, start=1):
        has_rank = row.best is not None and objective is not None and row.is_whole
        rank_text = str(rank_number) if has_rank else BLANK
        settings = [row.settings.get(name, "") for name in names]
        facts = row.facts
        line = [
            rank_text,
            row.name,
            _best_text(row),
            number_text(facts.get("objective")),
            *settings,
            number_text(facts.get("steps")),
            seconds_text(facts.get("seconds")),
            number_text(facts.get("micro_size")),
            number_text(facts.get("oom_restarts")),
            memory_text(facts.get("peak_memory_bytes")),
            row.state,
        ]
        cells.append(line)
    return header, cells


def _best_text(row: Row) -> str:
    """Return the best value, with its standard deviation over seeds."""
    if row.best is None:
        return BLANK
    text = f"{row.best:.4g}"
    if row.spread is not None:
        text += f" ± {row.spread:.2g}"
    return text


def table_with_settings(rows: Sequence[Row]) -> tuple[Header, Cells]:
    """Return header and cells of ranked rows, with one last column for all settings."""
    header, cells = table_of(rows, ())
    short_names = _short_names(setting_names(rows))
    for row, line in zip(rows, cells, strict=True):
        settings = [f"{short_names[name]}={value}" for name, value in row.settings.items()]
        line.append(" ".join(settings))
    return [*header, "settings"], cells


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Return the last part of each name, or the whole name where several end alike."""
    last_parts = {name: name.rpartition(".")[2] for name in names}
    counts = Counter(last_parts.values())
    short_names = {}
    for name, last_part in last_parts.items():
        short_names[name] = last_part if counts[last_part] == 1 else name
    return short_names


def table_of_plans(rows: Sequence[Row]) -> tuple[Header, Cells]:
    """Return header and cells of jobs that were planned."""
    cells: Cells = []
    for row in rows:
        facts = json_object(row.folder / PLAN)
        largest_micro_size = facts.get("largest_micro_size") or BLANK  # 0: not even one sample fits
        line = [
            row.name,
            memory_text(facts.get("peak_bytes")),
            facts.get("method") or BLANK,
            str(largest_micro_size),
            row.settings_text,
            _plan_result(facts),
        ]
        cells.append(line)
    return ["job", "peak", "method", "largest micro-batch", "settings", "best plan, or reason"], cells


def _plan_result(facts: dict[str, Any]) -> str:
    """Return the overrides of the best plan, or why there is none."""
    if facts.get("peak_bytes") is None:
        return "; ".join(facts.get("notes", []))
    best = facts.get("best") or {}
    if best.get("missing_bytes"):
        return "nothing fits"
    return str(best.get("overrides", ""))


# Files


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write a line per run, with a column per setting, and the names and units of result.json."""
    # A setting may have the name of another column.
    first_columns = ["rank", "job"]
    last_columns = [*FACTS, "state", "error", "directory"]
    setting_columns = {}
    for name in setting_names(rows):
        is_taken = name in first_columns or name in last_columns
        setting_columns[name] = f"setting {name}" if is_taken else name
    columns = [*first_columns, *setting_columns.values(), *last_columns]

    objective = objective_of(rows)
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for rank_number, row in enumerate(rows, start=1):
            values = dict(row.facts)
            for name, value in row.settings.items():
                values[setting_columns[name]] = value
            has_rank = row.best is not None and objective is not None
            values["rank"] = rank_number if has_rank else ""
            values["job"] = row.name
            values["state"] = row.state
            values["error"] = row.error
            values["directory"] = row.folder
            writer.writerow(values)


def write_markdown(header: Header, cells: Cells, path: Path) -> None:
    """Write a table in Markdown."""
    with atomic_write(path) as file:
        for line in (header, ["---"] * len(header), *cells):
            escaped = [cell.replace("|", "\\|") for cell in line]
            file.write(f"| {' | '.join(escaped)} |\n")


def write_page(folder: Path, rows: Sequence[Row]) -> None:
    """Write the page of a folder into it. Raises OSError if it cannot be written.

    Args:
        folder: of a sweep or of runs.
        rows: of the folder, from `read_rows`.
    """
    runs = [row for row in rows if not (row.folder / PLAN).exists()]
    begun = [row for row in runs if row.state != NOT_BEGUN]  # in the order of time
    ranked = rank(begun)
    names = setting_names(begun)

    # Tables.
    tables: list[page.Table] = []
    merged = rank(merge_seeds(runs))
    if merged:
        header, cells = table_of(merged, setting_names(merged))
        tables.append(("Over seeds: mean and standard deviation", header, cells))
    header, cells = table_of(ranked, names)
    _link_pages(ranked, cells, folder)
    tables.append(("Leaderboard", header, cells))
    failed = [[row.name, row.error] for row in ranked if row.error]
    if failed:
        tables.append(("Failed jobs", ["job", "error"], failed))

    # Points of the charts: `number` is the job's place in time.
    charted = []
    for row in ranked:
        if row.best is not None:
            settings = [row.settings.get(name, "") for name in names]
            charted.append({"name": row.name, "number": begun.index(row), "value": row.best, "settings": settings})

    # Lines below the title.
    counts = Counter(row.state for row in runs)
    counts_text = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = [f"{len(runs)} jobs: {counts_text}", str(folder)]
    page.write_sweep(folder / page.NAME, lines, tables, charted, names, objective_of(begun))


def _link_pages(rows: Sequence[Row], cells: Cells, folder: Path) -> None:
    """Replace the names in the cells of those rows that have a page by links to it, relative to the folder."""
    for row, line in zip(rows, cells, strict=True):
        page_of_row = row.folder / page.NAME
        if page_of_row.exists():
            line[1] = {"text": row.name, "page": os.path.relpath(page_of_row, folder)}
