"""The tables at the end of a multirun: of its training runs, also as `sweep.csv`, and of its plans. Imports no torch.

Each job notes its directory when it starts, and its error when it ends; numbers are those of its result.json or
plan.json. A launcher may run jobs in other processes, to which it sends the callback.
"""

import atexit
import csv
import json
import logging
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
from trainapp.signals import StopRequest
from trainapp.units import bytes_text, listed

TABLE = "sweep.csv"
_FILES = {"train": "result.json", "plan": "plan.json"}  # of the modes that have a table
_NUMBERS = ("steps", "seconds", "peak_memory_bytes", "oom_restarts", "micro_size", "accumulation")
log = logging.getLogger(__name__)
Job = dict[str, Any]  # what it has noted, and from `_read` on `facts`, its file's content, and `shown`, its overrides


class JobTables(Callback):
    """Prints the tables. Hydra skips `on_multirun_end` after a failed job or a signal: then `atexit` does."""

    def __init__(self) -> None:
        self._notes: Path | None = None  # None outside a multirun

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        folder = OmegaConf.select(config, "hydra.sweep.dir", throw_on_resolution_failure=False)
        if folder is not None:
            self._notes = Path(str(folder)).resolve() / f".jobs-{secrets.token_hex(4)}"
            atexit.register(self._show)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra, in the job's process. A file that is there already is an earlier process's."""
        self._write(config, ended=False, error=None)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra, in the job's process; not after a signal."""
        failed = job_return.status == JobStatus.FAILED
        # the public property writes to stderr, and raises
        error = _one_line(job_return._return_value) if failed else None
        self._write(config, ended=True, error=error)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        self._show()

    def _write(self, config: DictConfig, ended: bool, error: str | None) -> None:
        mode = OmegaConf.select(config, "mode", throw_on_resolution_failure=False)
        if self._notes is None or mode not in _FILES:
            return
        folder = Path(str(config.hydra.runtime.output_dir)).resolve()
        path, number = folder / _FILES[mode], config.hydra.job.num
        given = OmegaConf.select(config, "hydra.overrides.task", throw_on_resolution_failure=False) or []
        note = {"job": str(number), "mode": mode, "overrides": list(given), "folder": str(folder)}
        note |= {"ended": ended, "error": error, "before": path.stat().st_mtime_ns if path.exists() else None}
        self._notes.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._notes / f"{number}{'_ended' * ended}") as file:
            file.write(json.dumps(note))

    def _show(self) -> None:
        """Once. Jobs whose directories are not visible here are left out."""
        notes, self._notes = self._notes, None
        if notes is None or not notes.exists():
            return
        by_job: dict[int, Job] = {}
        for path in sorted(notes.iterdir()):  # a note of the end comes after that of the start
            note = json.loads(path.read_text())
            by_job[int(note["job"])] = note
        shutil.rmtree(notes, ignore_errors=True)
        jobs = [note for _, note in sorted(by_job.items()) if Path(note["folder"]).is_dir()]
        for mode, show in {"train": _show_runs, "plan": _show_plans}.items():
            if own := _read(jobs, mode):
                show(own, notes.parent)


def _one_line(raised: Any) -> str:
    lines = str(raised).splitlines() or [""]
    return "; ".join(map(str.strip, lines)) if isinstance(raised, UserError) else f"{type(raised).__name__}: {lines[0]}"


def _read(jobs: Sequence[Job], mode: str) -> list[Job]:
    """The jobs of this mode, with the content of their files, empty where there is none, and the overrides in which
    they differ.
    """
    own = [job for job in jobs if job["mode"] == mode]
    common = set.intersection(*(set(job["overrides"]) for job in own)) if len(own) > 1 else set()
    for job in own:
        path = Path(job["folder"]) / _FILES[mode]
        job["facts"] = {}
        job["shown"] = " ".join(text for text in job["overrides"] if text not in {f"mode={mode}", *common})
        if job["error"] is None and path.exists() and (job["ended"] or path.stat().st_mtime_ns != job["before"]):
            try:
                job["facts"] = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                log.warning("%s: %s", path, error)
    return own


def _print(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns of equal width, the last one as it is."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header) - 1)]
    for row in cells:
        shown = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        print("  ".join([*shown, row[-1]]).rstrip(), flush=True)


def _why(job: Job) -> str:
    """Why the job ended, or that it has not."""
    if job["error"] is not None:
        return f"failed: {job['error']}"
    return str(job["facts"].get("ended") or "ended" if job["ended"] or job["facts"] else "unfinished")


def _show_plans(jobs: Sequence[Job], _: Path) -> None:
    rows = []
    for job in jobs:
        facts = job["facts"]
        peak, best = facts.get("peak_bytes"), facts.get("best") or {}
        sizes = [str(facts.get(name) or "-") for name in ("largest_micro_size", "largest_eval_micro_size")]
        outcome = "nothing fits" if best.get("missing_bytes") else str(best.get("overrides", ""))
        outcome = outcome if peak is not None else str(job["error"] or "; ".join(facts.get("notes", [])) or "no plan")
        shown = ["-" if peak is None else bytes_text(peak), facts.get("method") or "-"]
        rows.append([job["job"], *shown, *sizes, job["shown"], outcome])
    _print(["job", "peak", "method", "largest micro-batch", "in evaluation", "overrides", "best plan, or reason"], rows)


def _show_runs(jobs: Sequence[Job], sweep_dir: Path) -> None:
    groups: dict[str, list[Job]] = {}  # by objective
    for job in jobs:
        job["value"] = _objective(job["facts"])
        if job["value"] is not None:
            groups.setdefault(f"{job['facts']['metric']} ({job['facts']['direction']})", []).append(job)
    best = {name: _best(own, name.endswith("(min)")) for name, own in groups.items()}
    is_best = {job["job"] for own in best.values() for job in own}
    rows = [_run_cells(job, job["job"] in is_best, len(groups) > 1) for job in jobs]
    name = next(iter(groups)) if len(groups) == 1 else "objective"
    numbers = ["steps", "time", "peak memory", "OOM restarts", "micro-batch"]
    _print(["job", name, *numbers, "overrides", "directory", "ended by"], rows)
    for name, own in best.items():
        if own and len(jobs) > 1:
            overrides = f": {own[0]['shown']}" if len(own) == 1 and own[0]["shown"] else ""
            where = f"job{'s' * (len(own) > 1)} {listed(job['job'] for job in own)}"
            print(f"best {name}: {own[0]['value']:.6g} in {where}{overrides}")
    if any(job["facts"] for job in jobs):  # else the table of an earlier sweep is still right
        _write_csv(jobs, is_best, sweep_dir / TABLE)


def _objective(facts: dict[str, Any]) -> float | None:
    """What sweepers receive. The file cannot hold nan and inf; its note begins with them."""
    name = facts.get("sweeper_receives", "objective")
    if facts.get(name) is None and f"{name}_note" in facts:
        return float(facts[f"{name}_note"].split()[0])
    return facts.get(name)


def _best(jobs: Sequence[Job], is_least: bool) -> list[Job]:
    """Of those that no signal has ended; several if they are equal."""
    ended = [job for job in jobs if job["facts"]["ended"] not in StopRequest.NAMES and math.isfinite(job["value"])]
    value = (min if is_least else max)((job["value"] for job in ended), default=None)
    return [job for job in ended if job["value"] == value]


def _run_cells(job: Job, is_best: bool, names_objective: bool) -> list[str]:
    facts, numbers = job["facts"], ["-"] * 5
    value = "-" if job["value"] is None else f"{job['value']:.6g}"
    if names_objective and job["value"] is not None:
        value += f" {facts['metric']} ({facts['direction']})"
    if facts:
        sizes, peak = f"{facts['micro_size']} x {facts['accumulation']}", bytes_text(facts["peak_memory_bytes"])
        numbers = [str(facts["steps"]), f"{facts['seconds']:.1f} s", peak, str(facts["oom_restarts"]), sizes]
    folder = Path(job["folder"])
    shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    return [job["job"], value + " *" * is_best, *numbers, job["shown"], shown, _why(job)]


def _write_csv(jobs: Sequence[Job], best: set[str], path: Path) -> None:
    """One line per job, with the names and units of result.json."""
    names = ["job", "overrides", "metric", "direction", "objective", "is_best", *_NUMBERS, "ended", "directory"]
    try:
        with atomic_write(path) as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            for job in jobs:
                own = {"overrides": job["shown"], "objective": job["value"], "directory": job["folder"]}
                own |= {"ended": _why(job), "job": job["job"], "is_best": str(job["job"] in best).lower()}
                writer.writerow(job["facts"] | own)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)
