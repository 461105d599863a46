"""The table of a sweep, or of a folder of runs: at its end, and at any time before (`trainapp leaderboard DIR`).

Ranked by the best value of the objective, whose checkpoint each run keeps. Where `train.seed` was swept, runs that
differ in nothing else are one row, with mean and standard deviation.
"""

import contextlib
import csv
import os
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainapp.config.excludes import NO_BEST, SET_OBJECTIVE
from trainapp.files import atomic_write, json_object, shown
from trainapp.launch.launch import COMMAND
from trainapp.report import page
from trainapp.report.page import UNKNOWN, memory_text, number_text, seconds_text
from trainapp.sweep import samplers
from trainapp.sweep.jobs import PLAN
from trainapp.sweep.journal import FACTS, JOURNAL, Journal, common_objective
from trainapp.sweep.rows import NOT_BEGUN, SEED, Row, found_in, goal_of, over_seeds, ranked
from trainapp.units import listed

TABLE, MARKDOWN = "leaderboard.csv", "leaderboard.md"
_LEAST = 20  # columns for the settings; with fewer they are a line of their own
Cells = list[list[Any]]


def show(folder: Path) -> None:
    """Print the table of a sweep or of a folder of runs, and write it to `leaderboard.csv` and `leaderboard.md`.

    Raises UserError for a folder without runs.
    """
    found = found_in(folder)
    if plans := [row for row in found if (row.folder / PLAN).exists()]:
        _print(["job", "peak", "method", "largest micro-batch", "settings", "best plan, or reason"], _plans(plans))
    runs = [row for row in found if row not in plans]
    rows = ranked([row for row in runs if row.state != NOT_BEGUN])
    if not rows:
        return
    header, cells = _with_settings(rows)
    _print(header, cells)
    if merged := ranked(over_seeds(runs)):
        print()
        _print(*_with_settings(merged))
    if (folder / JOURNAL).exists():
        _print_importance(Journal(folder, writes=False))
    if left := [row.swept for row in runs if not row.name]:
        print(f"{len(left)} jobs have not begun: {listed(left)}")
    for text in dict.fromkeys(row.error for row in rows if row.error):
        print(f"{listed([row.name for row in rows if row.error == text], 9)}: {text}")
    if goal_of(rows) is None and any(row.best is not None for row in rows):
        print("not ranked: their objectives differ")
    if without := [row.name for row in rows if row.has_no_best]:
        print(f"not ranked: {listed(without)}: {NO_BEST}; {SET_OBJECTIVE}")
    with contextlib.suppress(OSError):  # another user's folder
        _write_csv(rows, folder / TABLE)
        with atomic_write(folder / MARKDOWN) as file:
            for line in (header, ["---"] * len(header), *cells):
                file.write(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n")
        if not (folder / ".hydra").exists():  # that of a single run has more
            write_page(folder, found)
    _print_commands(rows)


def write_page(folder: Path, found: Sequence[Row]) -> None:
    """Write the page of what `found_in` has found in a folder. Raises OSError if it cannot be written."""
    runs = [row for row in found if not (row.folder / PLAN).exists()]
    rows = [row for row in runs if row.state != NOT_BEGUN]
    jobs, names = ranked(rows), _settings(rows)
    header, cells = _columns(jobs, names)
    for row, line in zip(jobs, cells, strict=True):
        if (own := row.folder / page.NAME).exists():
            line[1] = {"text": row.name, "page": os.path.relpath(own, folder)}
    tables: list[page.Table] = [("Leaderboard", header, cells)]
    if merged := ranked(over_seeds(runs)):
        tables.insert(0, ("Over seeds: mean and standard deviation", *_columns(merged, _settings(merged))))
    if failed := [[row.name, row.error] for row in jobs if row.error]:
        tables.append(("Failed jobs", ["job", "error"], failed))
    charted = [
        {"name": row.name, "number": rows.index(row), "value": row.best}
        | {"settings": [row.settings.get(name, "") for name in names]}
        for row in jobs
        if row.best is not None
    ]
    counts = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in runs).items())
    lines = [f"{len(runs)} jobs: {counts}", str(folder)]
    page.write_sweep(folder / page.NAME, lines, tables, charted, names, goal_of(rows))


def best_of(rows: Sequence[Row]) -> str:
    """The best value so far, for a line of progress."""
    first = next(iter(ranked(rows)), None)
    return f"{first.facts['metric']} {first.best:.4g} (job {first.name})" if first and first.best is not None else ""


def _settings(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.settings))


def _columns(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[str], Cells]:
    """Header and cells, as text, with a column for each of these settings."""
    goal, cells = goal_of(rows), Cells()
    for place, row in enumerate(rows, start=1):
        spread = f" ± {row.spread:.2g}" if row.spread is not None else ""
        has_place = row.best is not None and goal is not None and row.is_whole
        facts = row.facts
        last = number_text(facts.get("objective"))
        steps, micro, ooms = (number_text(facts.get(name)) for name in ("steps", "micro_size", "oom_restarts"))
        numbers = [steps, seconds_text(facts.get("seconds")), micro, ooms, memory_text(facts.get("peak_memory_bytes"))]
        best = UNKNOWN if row.best is None else f"{row.best:.4g}{spread}"
        own = [row.settings.get(name, "") for name in names]
        cells.append([str(place) if has_place else UNKNOWN, row.name, best, last, *own, *numbers, row.state])
    first = ["#", "job", f"{goal[0]} ({goal[1]})" if goal else "best", "last"]
    return [*first, *names, "steps", "time", "micro", "OOMs", "memory", "state"], cells


def _with_settings(rows: Sequence[Row]) -> tuple[list[str], Cells]:
    """The same, with one column for all settings: their names' last parts, where those are unique."""
    header, cells = _columns(rows, ())
    last = Counter(name.rpartition(".")[2] for name in _settings(rows))
    short = {name: own if last[own := name.rpartition(".")[2]] == 1 else name for name in _settings(rows)}
    for row, line in zip(rows, cells, strict=True):
        line.append(" ".join(f"{short[name]}={value}" for name, value in row.settings.items()))
    return [*header, "settings"], cells


def _print(header: Sequence[str], cells: Cells) -> None:
    """Columns of equal width, within the terminal's: what is the same in all rows is one line above, and the last
    column is wrapped, or below.
    """
    width, last = shutil.get_terminal_size((80, 24)).columns, [row[-1] for row in cells]
    note, kept, rows = page.without_constant(header[:-1], [row[:-1] for row in cells], first=3)
    if note:
        print(f"all: {note}")
    widths = [max(map(len, column)) for column in zip(kept, *rows, strict=True)]
    indent = sum(widths) + 2 * len(widths)
    is_beside = width - indent >= _LEAST
    for row, text in zip((kept, *rows), (header[-1] if any(last) else "", *last), strict=True):
        start = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True))
        lines = textwrap.wrap(text, width - (indent if is_beside else 4), break_on_hyphens=False)
        rest = [f"{' ' * (indent if is_beside else 4)}{line}" for line in lines[is_beside:]]
        print("\n".join([f"{start}  {lines[0] if is_beside and lines else ''}".rstrip(), *rest]), flush=True)


def _print_importance(journal: Journal) -> None:
    """Which settings matter, if Optuna is installed."""
    _, direction = common_objective(journal.facts) or ("", "")
    found = samplers.importances(journal.space, journal.trials, direction)
    found.pop(SEED, None)
    if len(found) > 1:
        print("importance:", ", ".join(f"{key.lstrip('+~')} {share:.2f}" for key, share in found.items()))


def _write_csv(rows: Sequence[Row], path: Path) -> None:
    """A line per run, with a column per setting, and the names and units of result.json."""
    own_names = ["rank", "job", *FACTS, "state", "error", "directory"]
    settings = {name: f"setting {name}" if name in own_names else name for name in _settings(rows)}
    with atomic_write(path) as file:
        names = [*own_names[:2], *settings.values(), *own_names[2:]]
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for place, row in enumerate(rows, start=1):
            rank = place if row.best is not None and goal_of(rows) else ""
            own = {"rank": rank, "job": row.name, "state": row.state, "error": row.error, "directory": row.folder}
            writer.writerow(row.facts | {settings[name]: value for name, value in row.settings.items()} | own)


def _print_commands(rows: Sequence[Row]) -> None:
    """What to do with the best run."""
    first = rows[0]
    if goal_of(rows) is None or not (first.folder / COMMAND).exists():
        return
    best = first.folder / "checkpoints" / f"step_{first.facts.get('best_step') or 0:08d}"
    print(f"best: job {first.name}, {first.facts['metric']} {first.best:.6g}; {first.swept}".rstrip("; "))
    config = yaml.safe_load((first.folder / ".hydra/config.yaml").read_text())
    length = (first.facts.get("ended") or "").partition("=")[0].removeprefix("train.")
    if length in ("max_steps", "max_epochs"):
        other = "max_epochs" if length == "max_steps" else "max_steps"
        without = f" train.{other}=null" if config.get("train", {}).get(other) is not None else ""
        print(f"  train it longer   python -m trainapp continue {shown(first.folder)} train.{length}=N{without}")
    packages, given = config.get("user_packages"), json_object(first.folder / COMMAND)["arguments"]
    flags = [shlex.quote(text) for text in given if text.startswith("--")]
    more = [f"'user_packages=[{','.join(packages)}]'"] if packages else []
    for does, mode in (("evaluate it", "eval"), ("export it", "export")) if best.exists() else ():
        own = [*flags, f"mode={mode}", f"checkpointing.resume={shown(best)}", *more]
        print(f"  {does:<16}  python -m trainapp {' '.join(own)}")


def _plans(rows: Sequence[Row]) -> Cells:
    cells = []
    for row in rows:
        facts = json_object(row.folder / PLAN)
        peak, best = facts.get("peak_bytes"), facts.get("best") or {}
        outcome = "nothing fits" if best.get("missing_bytes") else str(best.get("overrides", ""))
        if peak is None:
            outcome = "; ".join(facts.get("notes", []))
        numbers = [memory_text(peak), facts.get("method") or UNKNOWN]
        cells.append([row.name, *numbers, str(facts.get("largest_micro_size") or UNKNOWN), row.swept, outcome])
    return cells
