"""The tables at the end of a multirun: training runs (also as `sweep.csv`) and plans. Imports no torch.

Each job notes its directory when it starts, and its error when it ends; the numbers are those of its result.json or
plan.json. A launcher may run jobs in other processes; it sends them the callback.
"""

import atexit
import csv
import json
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainapp.errors import UserError
from trainapp.files import atomic_write
from trainapp.signals import SIGNALS, TIME_IS_UP, named
from trainapp.units import bytes_text, listed

TABLE = "sweep.csv"
_FILES = {"train": "result.json", "plan": "plan.json"}  # the modes with a table
_NUMBERS = ("steps", "seconds", "peak_memory_bytes", "oom_restarts", "micro_size", "accumulation")
Job = dict[str, Any]  # its note; after `_read` also `facts` (the content of its file) and `shown` (its overrides)


class JobTables(Callback):
    """Prints the tables; through `atexit`, since Hydra skips `on_multirun_end` after a failed job or a signal."""

    def __init__(self) -> None:
        self._notes: Path | None = None  # None outside a multirun

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        if folder is not None:
            self._notes = Path(str(folder)).resolve() / f".jobs-{secrets.token_hex(4)}"
            atexit.register(self.on_multirun_end)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra, in the job's process."""
        self._note(config, "unfinished")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra, in the job's process; by 1.4 also after a signal, which leaves the job unfinished."""
        value = job_return._return_value  # the public property writes to stderr and raises
        if job_return.status != JobStatus.FAILED:
            self._note(config, "ended")
        elif isinstance(value, Exception):
            self._note(config, f"failed: {_one_line(value)}")

    def _note(self, config: DictConfig, state: str) -> None:
        mode = OmegaConf.select(config, "mode", throw_on_resolution_failure=False)
        if self._notes is None or mode not in _FILES:
            return
        given = OmegaConf.select(config, "hydra.overrides.task", throw_on_resolution_failure=False) or []
        folder = str(Path(str(config.hydra.runtime.output_dir)).resolve())
        note = {"job": str(config.hydra.job.num), "mode": mode, "overrides": list(given), "folder": folder}
        self._notes.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._notes / note["job"]) as file:
            file.write(json.dumps(note | {"state": state}))

    def on_multirun_end(self, config: DictConfig | None = None, **_: Any) -> None:
        """Print the tables, once. Omits jobs whose directories are not visible here."""
        notes, self._notes = self._notes, None
        if notes is None or not notes.exists():
            return
        jobs = [json.loads(path.read_text()) for path in sorted(notes.iterdir(), key=lambda path: int(path.name))]
        shutil.rmtree(notes, ignore_errors=True)
        jobs = [job for job in jobs if Path(job["folder"]).is_dir()]
        if runs := _read(jobs, "train"):
            _show_runs(runs, notes.parent)
        if plans := _read(jobs, "plan"):
            _show_plans(plans)


def _one_line(raised: Any) -> str:
    lines = str(raised).splitlines() or [""]
    return "; ".join(map(str.strip, lines)) if isinstance(raised, UserError) else f"{type(raised).__name__}: {lines[0]}"


def _read(jobs: Sequence[Job], mode: str) -> list[Job]:
    """The jobs of this mode. Sets their `facts`, empty without a file, and `shown`, the overrides that differ."""
    own = [job for job in jobs if job["mode"] == mode]
    common = set.intersection(*(set(job["overrides"]) for job in own)) if len(own) > 1 else set()
    for job in own:
        job["shown"] = " ".join(text for text in job["overrides"] if text not in {f"mode={mode}", *common})
        path = Path(job["folder"]) / _FILES[mode]
        has_file = path.exists() and not job["state"].startswith("failed")
        job["facts"] = json.loads(path.read_text()) if has_file else {}
    return own


def _print(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns of equal width; the last is not padded."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header) - 1)]
    for row in cells:
        shown = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        print("  ".join([*shown, row[-1]]).rstrip(), flush=True)


def _show_plans(jobs: Sequence[Job]) -> None:
    rows = []
    for job in jobs:
        facts = job["facts"]
        peak, best = facts.get("peak_bytes"), facts.get("best") or {}
        outcome = "nothing fits" if best.get("missing_bytes") else str(best.get("overrides", ""))
        if peak is None:
            outcome = "; ".join(facts.get("notes", [])) or job["state"]
        shown = ["-" if peak is None else bytes_text(peak), facts.get("method") or "-"]
        rows.append([job["job"], *shown, str(facts.get("largest_micro_size") or "-"), job["shown"], outcome])
    _print(["job", "peak", "method", "largest micro-batch", "overrides", "best plan, or reason"], rows)


def _show_runs(jobs: Sequence[Job], sweep_dir: Path) -> None:
    """Print the table and write it to a file, unless no job has a result."""
    for job in jobs:
        job["value"] = _objective(job["facts"])
        job["ended"] = job["facts"].get("ended") or job["state"]
    names = {f"{job['facts']['metric']} ({job['facts']['direction']})" for job in jobs if job["value"] is not None}
    name = names.pop() if len(names) == 1 else "objective"  # different objectives are not compared
    best = _best(jobs, name.endswith("(min)")) if name != "objective" else []
    numbers = ["steps", "time", "peak memory", "OOM restarts", "micro-batch"]
    _print(["job", name, *numbers, "overrides", "directory", "ended by"], [_cells(job, job in best) for job in jobs])
    if best and len(jobs) > 1:
        overrides = f": {best[0]['shown']}" if len(best) == 1 and best[0]["shown"] else ""
        where = f"job{'s' * (len(best) > 1)} {listed(job['job'] for job in best)}"
        print(f"best {name}: {best[0]['value']:.6g} in {where}{overrides}")
    if any(job["facts"] for job in jobs):
        _write_csv(jobs, best, sweep_dir / TABLE)


def _objective(facts: dict[str, Any]) -> float | None:
    """The value that sweepers receive. JSON has no nan and inf: the note begins with them."""
    note = facts.get("objective_note")
    return float(note.split()[0]) if note else facts.get("objective")


def _best(jobs: Sequence[Job], is_least: bool) -> list[Job]:
    """The best jobs not ended by a signal or `train.max_time`; several if they are equal."""
    finite = [job for job in jobs if job["value"] is not None and math.isfinite(job["value"])]
    ended = [job for job in finite if not job["ended"].startswith(tuple(map(named, (*SIGNALS, TIME_IS_UP))))]
    value = (min if is_least else max)((job["value"] for job in ended), default=None)
    return [job for job in ended if job["value"] == value]


def _cells(job: Job, is_best: bool) -> list[str]:
    facts, numbers = job["facts"], ["-"] * 5
    value = "-" if job["value"] is None else f"{job['value']:.6g}"
    if facts:
        sizes, peak = f"{facts['micro_size']} x {facts['accumulation']}", bytes_text(facts["peak_memory_bytes"])
        numbers = [str(facts["steps"]), f"{facts['seconds']:.1f} s", peak, str(facts["oom_restarts"]), sizes]
    folder = Path(job["folder"])
    shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    return [job["job"], value + " *" * is_best, *numbers, job["shown"], shown, job["ended"]]


def _write_csv(jobs: Sequence[Job], best: Sequence[Job], path: Path) -> None:
    """Write one line per job, with the names and units of result.json."""
    names = ["job", "overrides", "metric", "direction", "objective", "is_best", *_NUMBERS, "ended", "directory"]
    with atomic_write(path) as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for job in jobs:
            own = {"job": job["job"], "overrides": job["shown"], "objective": job["value"], "ended": job["ended"]}
            own |= {"directory": job["folder"], "is_best": str(job in best).lower()}
            writer.writerow(job["facts"] | own)
