"""After a multirun of training runs: one table over them, and the same as `sweep.csv`. Imports no torch."""

import atexit
import csv
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from trainapp.errors import UserError
from trainapp.files import atomic_write
from trainapp.launch import job_notes
from trainapp.launch.job_notes import modified_ns
from trainapp.launch.one_run import is_for_mode
from trainapp.run.experiment import RESULT
from trainapp.signals import StopRequest
from trainapp.units import bytes_text, listed

TABLE = "sweep.csv"
_NUMBERS = ("steps", "seconds", "peak_memory_bytes", "oom_restarts", "micro_size", "accumulation")
_HEADER = ["steps", "time", "peak memory", "OOM restarts", "micro-batch", "overrides", "directory", "ended by"]
log = logging.getLogger(__name__)


class RunTable(Callback):
    """Prints how the training runs of a sweep have ended, from each one's result.json.

    Each job notes its directory when it starts, and its error when it ends: a launcher may run it in another process,
    to which it sends this object. A job without a second note was stopped, or still runs elsewhere.
    """

    def __init__(self) -> None:
        self._notes: job_notes.JobNotes | None = None  # None outside a multirun

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra, which skips the end after a failed job or a signal: the table is then left to `atexit`."""
        self._notes = job_notes.of_sweep(config, "runs")
        atexit.register(self._show)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra, in the job's process. A result that is there already is an earlier process's."""
        if self._notes is not None and is_for_mode(config, "train"):
            self._notes.write(config, _place(config) | {"ended": False, "before": modified_ns(_result_file(config))})

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra, in the job's process; not after a signal."""
        if self._notes is not None and is_for_mode(config, "train"):
            self._notes.write(config, _place(config) | {"ended": True, "error": _error_text(job_return)})

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        self._show()

    def _show(self) -> None:
        """Once. Jobs whose directories are not visible here are left out. A table without results does not replace an
        earlier one: the results in the directories are still those.
        """
        notes, self._notes = self._notes, None
        seen = [] if notes is None else [note for note in notes.read() if Path(note["directory"]).is_dir()]
        if notes is None or not seen:
            return
        shown = job_notes.differing([note["overrides"] for note in seen], "train")
        rows = [_row(note, overrides) for note, overrides in zip(seen, shown, strict=True)]
        _mark_best(rows)
        print("\n".join(_lines(rows)), flush=True)
        path = notes.sweep_dir / TABLE
        if not any(row.numbers for row in rows) and path.exists():
            print(f"{path} is still that of an earlier sweep", flush=True)
            return
        try:
            _write(path, rows)
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error)


@dataclass
class _Row:
    """A job of the table. objective: what Hydra's sweepers receive; None where there was no evaluation."""

    job: str
    overrides: str
    directory: Path
    ended: str
    is_finished: bool = False
    metric: str | None = None
    direction: str | None = None
    objective: float | None = None
    is_best: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)


def _place(config: DictConfig) -> dict[str, str]:
    return {"directory": str(Path(str(config.hydra.runtime.output_dir)).resolve())}


def _result_file(config: DictConfig) -> Path:
    return Path(str(config.hydra.runtime.output_dir)) / RESULT


def _error_text(job_return: JobReturn) -> str | None:
    """What the run has raised; None where it has not."""
    if job_return.status != JobStatus.FAILED:
        return None
    error = job_return._return_value  # the public property writes to stderr, and raises
    if isinstance(error, UserError):
        return job_notes.one_line(str(error))
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _row(note: dict[str, Any], overrides: str) -> _Row:
    """Of a failed job nothing but its error: what is in its directory may be of another run, or of an earlier one."""
    folder = Path(note["directory"])
    row = _Row(note["job"], overrides, folder, "unfinished")
    if note["ended"] and note["error"] is not None:
        row.ended = f"failed: {note['error']}"
        return row
    facts = _result(folder / RESULT) if note["ended"] or modified_ns(folder / RESULT) != note["before"] else None
    if facts is None:
        row.ended = f"no {RESULT} that can be read" if note["ended"] else row.ended
        return row
    row.ended = job_notes.one_line(facts["ended"] or "")
    row.is_finished = row.ended not in StopRequest.NAMES
    row.metric, row.direction, row.objective = facts["metric"], facts.get("direction"), _objective(facts)
    row.numbers = {name: facts[name] for name in _NUMBERS}
    return row


def _shown(folder: Path) -> str:
    """From the current directory, as it can be pasted."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _result(path: Path) -> dict[str, Any] | None:
    """The content of result.json; None where another program has written, or removed, the file."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    needed = {"metric", "objective", "best_objective", "sweeper_receives", "ended", *_NUMBERS}
    return facts if isinstance(facts, dict) and facts.keys() >= needed else None


def _objective(facts: dict[str, Any]) -> float | None:
    """The file cannot hold nan and inf; its note begins with them."""
    name = facts["sweeper_receives"]
    if facts[name] is None and f"{name}_note" in facts:
        return float(facts[f"{name}_note"].split()[0])
    return facts[name]


def _mark_best(rows: Sequence[_Row]) -> None:
    """The best of the finished runs for each metric and direction; all of those that are equal."""
    for own in _by_objective(rows).values():
        values = [row.objective for row in own if row.is_finished and row.objective is not None]
        finite = [value for value in values if math.isfinite(value)]
        if finite and own[0].direction is not None:
            best = (min if own[0].direction == "min" else max)(finite)
            for row in own:
                row.is_best = row.is_finished and row.objective == best


def _by_objective(rows: Sequence[_Row]) -> dict[tuple[str, str | None], list[_Row]]:
    """The rows with a result by metric and direction."""
    found: dict[tuple[str, str | None], list[_Row]] = {}
    for row in rows:
        if row.metric is not None:
            found.setdefault((row.metric, row.direction), []).append(row)
    return found


def _lines(rows: Sequence[_Row]) -> Iterator[str]:
    """The table, and a line that names the best for each objective. What ended the runs is shown where it differs."""
    objectives = _by_objective(rows)
    is_same = len(objectives) == 1
    name = _objective_text(*next(iter(objectives))) if is_same else "objective"
    are_alike = len({row.ended for row in rows}) == 1 and rows[0].is_finished
    cells = [["job", name, *_HEADER], *(_cells(row, is_same) for row in rows)]
    header, *body = [own[:-1] for own in cells] if are_alike else cells
    yield job_notes.table(header, body)
    for objective, own in objectives.items():
        best = [row for row in own if row.is_best]
        if best and len(rows) > 1:
            overrides = f": {best[0].overrides}" if len(best) == 1 and best[0].overrides else ""
            jobs = f"job{'s' * (len(best) > 1)} {listed(row.job for row in best)}"
            yield f"best {_objective_text(*objective)}: {best[0].objective:.6g} in {jobs}{overrides}"


def _objective_text(metric: str, direction: str | None) -> str:
    return metric if direction is None else f"{metric} ({direction})"


def _cells(row: _Row, is_same: bool) -> list[str]:
    """is_same: whether the header names the objective."""
    value = "-" if row.objective is None else f"{row.objective:.6g}"
    if row.objective is not None and not is_same and row.metric is not None:
        value += f" {_objective_text(row.metric, row.direction)}"
    of = row.numbers
    numbers = ["-"] * 5
    if of:
        sizes = f"{of['micro_size']} x {of['accumulation']}"
        peak = bytes_text(of["peak_memory_bytes"])
        numbers = [str(of["steps"]), f"{of['seconds']:.1f} s", peak, str(of["oom_restarts"]), sizes]
    return [row.job, value + " *" * row.is_best, *numbers, row.overrides, _shown(row.directory), row.ended]


def _write(path: Path, rows: Sequence[_Row]) -> None:
    """One line per job, with the names and units of result.json."""
    names = ["metric", "direction", "objective", "is_best", *_NUMBERS, "ended", "directory"]
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, ["job", "overrides", *names], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(vars(row) | row.numbers | {"is_best": str(row.is_best).lower()})
