"""The table of a sweep, or of a folder of runs: at its end, and at any time before (`trainapp leaderboard DIR`).

Ranked by the best value of the objective, whose checkpoint each run keeps. Where `train.seed` was swept, runs that
differ in nothing else are one row, with mean and standard deviation.
"""

import contextlib
import csv
import json
import math
import shlex
import shutil
import statistics
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainapp.errors import UserError
from trainapp.files import atomic_write, json_lines
from trainapp.launch.launch import COMMAND
from trainapp.report import page
from trainapp.run import run_dir
from trainapp.sweep import samplers
from trainapp.sweep.composing import shown
from trainapp.sweep.jobs import FILES
from trainapp.sweep.journal import NAME, Journal, facts_of
from trainapp.sweep.space import Space
from trainapp.units import bytes_text, listed

TABLE, MARKDOWN = "leaderboard.csv", "leaderboard.md"
SEED = "train.seed"
_LEAST = 20  # columns for the settings; with fewer they are a line of their own
_NUMBERS = (
    *("metric", "direction", "objective", "best_objective", "best_step", "steps", "seconds", "micro_size"),
    *("accumulation", "oom_restarts", "peak_memory_bytes"),
)


@dataclass
class Row:
    """A run. settings: those in which runs differ. facts: of its result.json, or of what it has logged so far."""

    name: str
    folder: Path
    settings: dict[str, str]
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    spread: float | None = None  # of a row for several seeds: the standard deviation of their best values
    seeds: int = 1
    is_whole: bool = True  # whether all of the seeds have finished

    def number(self, name: str) -> float | None:
        """A fact that is a finite number."""
        value = self.facts.get(name)
        return None if value is None or not math.isfinite(value) else float(value)

    @property
    def swept(self) -> str:
        """The settings, without the sections of those with a unique last name."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def rows_of(journal: Journal, is_live: bool = True) -> list[Row]:
    """The trials of a sweep. is_live: read what they have logged and, where one has been trained longer, its result."""
    rows = []
    for trial in journal.trials:
        folder, facts, state = Path(trial.folder), trial.facts, trial.state
        if is_live and trial.folder and state not in ("failed", "infeasible"):
            facts = facts | facts_of(_result_in(folder))
            if state == "running":
                facts = facts | _so_far(folder, facts)
                state = "running" if run_dir.is_in_use(folder) else "interrupted"
        settings = dict(zip(journal.keys, trial.values, strict=True))
        rows.append(Row(str(trial.number), folder, settings, state, facts, trial.error))
    return rows


def runs_in(folder: Path) -> list[Row]:
    """The runs in a folder, at any depth, with the overrides in which they differ."""
    found = {}
    for path in sorted(folder.rglob(COMMAND)):
        given = yaml.safe_load((path.parent / "overrides.yaml").read_text()) or []
        found[path.parents[1]] = dict(text.lstrip("+").partition("=")[::2] for text in given)
    common = set.intersection(*(set(own.items()) for own in found.values())) if len(found) > 1 else set()
    rows = []
    for own, given in found.items():
        facts = _result_in(own)
        state = "stopped" if facts.get("stopped") else "finished" if facts.get("ended") else "unfinished"
        settings = {name: value for name, value in given.items() if (name, value) not in common}
        rows.append(Row(str(own.relative_to(folder)), own, settings, state, facts or _so_far(own, {})))
    return rows


def _result_in(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / FILES["train"]).read_text()))
    return {}


def _so_far(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a run that has not ended has logged: its steps, and its objective if it is known which that is."""
    found: dict[str, Any] = {}
    if lines := json_lines(folder / "metrics.jsonl"):
        found["steps"] = lines[-1]["step"]
    values = [line.get(facts.get("metric", "")) for line in json_lines(folder / "evaluations.jsonl")]
    if values := [value for value in values if value is not None]:
        best = max if facts["direction"] == "max" else min
        found |= {"objective": values[-1], "best_objective": best(values)}
    return found


def found_in(folder: Path) -> list[Row]:
    """The jobs of a sweep, or the runs in a folder. Raises UserError for a folder without any."""
    is_sweep = (folder / NAME).exists()
    rows = rows_of(Journal(folder, writes=False)) if is_sweep else runs_in(folder)
    if not rows:
        raise UserError(f"{folder}: no sweep and no runs are here; name the directory of a sweep, or one with runs")
    return rows


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The best first; those without a value, or of which not all seeds have finished, last. Rows with different
    objectives keep their order.
    """
    if (goal := goal_of(rows)) is None:
        return list(rows)
    sign = -1 if goal[1] == "max" else 1

    def rank(row: Row) -> tuple[bool, float]:
        value = row.number("best_objective")
        return not row.is_whole, math.inf if value is None else sign * value

    return sorted(rows, key=rank)


def goal_of(rows: Sequence[Row]) -> tuple[str, str] | None:
    """The metric and direction by which all rows with a value are compared; None if they differ, or none has one."""
    goals = {(row.facts["metric"], row.facts["direction"]) for row in rows if row.number("best_objective") is not None}
    return goals.pop() if len(goals) == 1 else None


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for runs that differ only in `train.seed`."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        others = {name: value for name, value in row.settings.items() if name != SEED}
        groups.setdefault(tuple(others.items()), []).append(row)
    merged = []
    for key, own in groups.items():
        done = [row for row in own if row.state == "finished" and row.number("best_objective") is not None]
        facts = dict(done[0].facts) if done else {}
        for name in ("objective", "best_objective", "seconds", "steps"):
            if values := [value for row in done if (value := row.number(name)) is not None]:
                facts[name] = statistics.fmean(values)
        for name in ("oom_restarts", "peak_memory_bytes"):
            facts |= {name: max((row.facts.get(name, 0) for row in done), default=0)} if done else {}
        best = [row.facts["best_objective"] for row in done]
        spread = statistics.stdev(best) if len(best) > 1 else None
        states = {row.state for row in own}
        state = states.pop() if len(states) == 1 else f"{len(done)} of {len(own)}"
        name = ",".join(sorted((row.name for row in own), key=lambda name: (len(name), name)))
        folder = own[0].folder.parent
        merged.append(Row(name, folder, dict(key), state, facts, "", spread, len(done), len(done) == len(own)))
    return merged


def show(folder: Path) -> None:
    """Print the table of a sweep or of a folder of runs, and write it to `leaderboard.csv` and `leaderboard.md`.

    Raises UserError for a folder without runs.
    """
    rows = found_in(folder)
    plans = [row for row in rows if (row.folder / FILES["plan"]).exists()]
    if plans:
        _show_plans(plans)
    if len(plans) == len(rows):
        return
    rows = ranked([row for row in rows if row not in plans])
    header, cells = _cells(rows)
    _print(header, cells)
    merged = ranked(over_seeds(rows))
    if len(merged) < len(rows):
        print()
        _print(*_cells(merged))
    if (folder / NAME).exists():
        _print_importance(Journal(folder, writes=False))
    by_error: dict[str, list[str]] = {}
    for row in rows:
        by_error.setdefault(row.error, []).append(row.name)
    print("".join(f"{listed(names, 9)}: {error}\n" for error, names in by_error.items() if error), end="")
    if goal_of(rows) is None and any(row.number("best_objective") is not None for row in rows):
        print("not ranked: their objectives differ")
    with contextlib.suppress(OSError):  # another user's folder
        _write_csv(rows, folder / TABLE)
        with atomic_write(folder / MARKDOWN) as file:
            file.write("\n".join(_markdown(header, cells)) + "\n")
        if not (folder / ".hydra").exists():  # that of a single run has more
            write_page(folder)
    _print_commands(rows)


def write_page(folder: Path) -> Path:
    """Write the page of a sweep or of a folder of runs. Returns its path.

    Raises UserError for a folder without runs, and OSError if it cannot be written.
    """
    rows = [row for row in found_in(folder) if not (row.folder / FILES["plan"]).exists()]
    numbers = {row.name: number for number, row in enumerate(rows)}
    jobs = [asdict(row) | {"number": numbers[row.name]} for row in ranked(rows)]
    merged = [asdict(row) | {"number": None} for row in ranked(over_seeds(rows))]
    path = folder / page.NAME
    page.write_sweep(path, jobs, merged if len(merged) < len(rows) else ())
    return path


def best_of(rows: Sequence[Row]) -> str:
    """The best value so far, for a line of progress."""
    first = next(iter(ranked(rows)), None)
    if first is None or (value := first.number("best_objective")) is None:
        return ""
    return f"{first.facts['metric']} {value:.4g} (job {first.name})"


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, as text; the last column is what runs differ in, which may be long."""
    goal = goal_of(rows)
    names, cells = _short(rows), []
    for place, row in enumerate(rows, start=1):
        best, last, facts = row.number("best_objective"), row.number("objective"), row.facts
        spread = f" ± {row.spread:.2g}" if row.spread is not None else ""
        cells.append(
            [
                str(place) if best is not None and goal and row.is_whole else "-",
                row.name,
                "-" if best is None else f"{best:.4g}{spread}",
                "-" if last is None else f"{last:.4g}",
                f"{facts['steps']:.0f}" if "steps" in facts else "-",
                f"{facts['seconds']:.0f} s" if "seconds" in facts else "-",
                str(facts.get("micro_size", "-")),
                str(facts.get("oom_restarts", "-")),
                bytes_text(facts["peak_memory_bytes"]) if "peak_memory_bytes" in facts else "-",
                row.state,
                " ".join(f"{names[name]}={value}" for name, value in row.settings.items()),
            ]
        )
    return [
        "#",
        "job",
        f"{goal[0]} ({goal[1]})" if goal else "best",
        "last",
        "steps",
        "time",
        "micro",
        "OOMs",
        "memory",
        "state",
        "settings",
    ], cells


def _short(rows: Sequence[Row]) -> dict[str, str]:
    """The last part of each setting's name, where that is unique."""
    names = dict.fromkeys(name for row in rows for name in row.settings)
    last = [name.rpartition(".")[2] for name in names]
    return {name: own if last.count(own) == 1 else name for name, own in zip(names, last, strict=True)}


def _print(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns of equal width, within the terminal's: what is the same in all rows is one line above, and the last
    column is wrapped, or below.
    """
    width = shutil.get_terminal_size((80, 24)).columns
    same = [at for at in range(3, len(header) - 1) if len(rows) > 1 and len({row[at] for row in rows}) == 1]
    above = [f"{header[at]} {rows[0][at]}" for at in same if rows[0][at] != "-"]
    kept = [at for at in range(len(header)) if at not in same]
    cells = [[row[at] for at in kept] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    if above:
        print(f"all: {', '.join(above)}")
    indent = sum(widths) + 2 * len(widths)
    is_beside = width - indent >= _LEAST
    for row in cells:
        start = "  ".join(cell.ljust(size) for cell, size in zip(row[:-1], widths, strict=True))
        lines = textwrap.wrap(row[-1], width - (indent if is_beside else 4), break_on_hyphens=False)
        rest = [f"{' ' * (indent if is_beside else 4)}{line}" for line in lines[is_beside:]]
        print("\n".join([f"{start}  {lines[0] if is_beside and lines else ''}".rstrip(), *rest]), flush=True)


def _print_importance(journal: Journal) -> None:
    """Which settings matter, if Optuna is installed."""
    space = Space.from_dict(journal.asked["asked"]["dimensions"])
    direction = next((own.facts["direction"] for own in journal.trials if "direction" in own.facts), "")
    found = samplers.importances(space, journal.trials, direction)
    found.pop(SEED, None)
    if len(found) > 1:
        print(f"importance: {', '.join(f'{key} {share:.2f}' for key, share in found.items())}")


def tell_tensorboard(run: Path, settings: dict[str, str]) -> None:
    """Add a job's settings to its event files, for TensorBoard's table of hyperparameters."""
    if not (run / "tensorboard").is_dir():
        return
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    plain: dict[str, float | str] = dict(settings)
    for name, text in settings.items():
        with contextlib.suppress(ValueError):
            plain[name] = float(text)
    writer = EventFileWriter(str(run / "tensorboard"))
    writer.add_event(Event(wall_time=time.time(), summary=hparams_pb(plain, trial_id=run.name)))
    writer.close()


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _write_csv(rows: Sequence[Row], path: Path) -> None:
    """A line per run, with a column per setting, and the names and units of result.json."""
    settings = dict.fromkeys(name for row in rows for name in row.settings)
    with atomic_write(path) as file:
        own_names = ["rank", "job", *_NUMBERS, "state", "error", "directory"]
        settings = {name: f"setting {name}" if name in own_names else name for name in settings}
        names = [*own_names[:2], *settings.values(), *own_names[2:]]
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for place, row in enumerate(rows, start=1):
            rank = place if row.number("best_objective") is not None and goal_of(rows) else ""
            own = {"rank": rank, "job": row.name, "state": row.state, "error": row.error, "directory": row.folder}
            writer.writerow(row.facts | {settings[name]: value for name, value in row.settings.items()} | own)


def _print_commands(rows: Sequence[Row]) -> None:
    """How to go on with the best run."""
    first = ranked(rows)[0]
    if goal_of(rows) is None or not (first.folder / COMMAND).exists():
        return
    best = first.folder / "checkpoints" / f"step_{first.facts.get('best_step') or 0:08d}"
    value = f"{first.facts['metric']} {first.facts['best_objective']:.6g}"
    print(f"best: job {first.name}, {value}; {first.swept}".rstrip("; "))
    print(f"  train it longer   python -m trainapp continue {shown(first.folder)} train.max_epochs=N")
    given = json.loads((first.folder / COMMAND).read_text())["arguments"]
    packages = yaml.safe_load((first.folder / ".hydra/config.yaml").read_text()).get("user_packages")
    more = [shlex.quote(text) for text in given if text.startswith("--")]
    more += [f"'user_packages=[{','.join(packages)}]'"] if packages else []
    for does, mode in (("evaluate it", "eval"), ("export it", "export")) if best.exists() else ():
        own = [f"mode={mode}", f"checkpointing.resume={shown(best)}", *more]
        print(f"  {does:<16}  python -m trainapp {' '.join(own)}")


def _show_plans(rows: Sequence[Row]) -> None:
    """The table of plans."""
    cells = []
    for row in rows:
        facts = json.loads((row.folder / FILES["plan"]).read_text())
        peak, best = facts.get("peak_bytes"), facts.get("best") or {}
        outcome = "nothing fits" if best.get("missing_bytes") else str(best.get("overrides", ""))
        if peak is None:
            outcome = "; ".join(facts.get("notes", []))
        numbers = ["-" if peak is None else bytes_text(peak), facts.get("method") or "-"]
        cells.append([row.name, *numbers, str(facts.get("largest_micro_size") or "-"), row.swept, outcome])
    _print(["job", "peak", "method", "largest micro-batch", "settings", "best plan, or reason"], cells)
