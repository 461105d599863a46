"""Runs a step in a subprocess with a time limit, and ends all that it has started."""

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .plan import Step
from .table import MEASURED, MISSED, NEEDS_CUDA, Row, read


@dataclass
class Outcome:
    """How a step ended."""

    step: Step
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def missed(self) -> list[Row]:
        """Rows whose expectation was not met."""
        return [row for row in self.rows if row.verdict == MISSED]

    @property
    def verdict(self) -> str:
        """In a few words, for the screen."""
        expected = [row for row in self.rows if row.verdict not in (MEASURED, NEEDS_CUDA)]
        left_out = len([row for row in self.rows if row.verdict == NEEDS_CUDA])
        if self.missed:
            return f"{len(self.missed)} of {len(expected)} NOT as expected"
        if not expected:
            return "needs CUDA" if left_out else "measured"
        return f"as expected ({len(expected)})" + (f", {left_out} need CUDA" if left_out else "")


def run_step(step: Step, device: str, folder: Path, seconds: float) -> Outcome:
    """Run the step for at most `seconds`. Its files and its log go to `folder`."""
    work, rows, log = folder / step.name, folder / f"{step.name}.jsonl", folder / f"{step.name}.log"
    work.mkdir(parents=True, exist_ok=True)
    rows.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpu_check.step", step.entry, "--device", device]
    # Sizes that one step remembers would change another's.
    environment = os.environ | {"TRAINAPP_CACHE": str(work / "cache"), "COLUMNS": "200"}
    # As `trainapp.launch` sets it: torch reads it while it is imported (2.13, c10/cuda/CUDAAllocatorConfig.h).
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if device == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors gain nothing from threads
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--folder", str(work), "--rows", str(rows)],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_family(process)
    outcome = Outcome(step, read(rows), time.monotonic() - started)
    ends = "the step ends by itself"
    if code is None:
        outcome.rows.append(Row(ends, f"within {seconds:.0f} s", f"stopped after {outcome.seconds:.0f} s", MISSED))
    elif code:
        got = f"signal {-code}" if code < 0 else f"exit code {code}"
        outcome.rows.append(Row(ends, "exit code 0", f"{got}: {last_line(log)}"[:160], MISSED))
    return outcome


def end_family(process: subprocess.Popen) -> None:
    """Kill the process and all its descendants, also those whose parent has ended: they hold memory of the device."""
    family = []
    for other in psutil.process_iter():
        try:
            if other.pid != process.pid and os.getsid(other.pid) == process.pid:
                family.append(other)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    with contextlib.suppress(psutil.NoSuchProcess):
        family += psutil.Process(process.pid).children(recursive=True)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()
    until = time.monotonic() + 5
    while not all(map(has_ended, family)) and time.monotonic() < until:  # the next step needs the memory that they hold
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    """Also if its parent has not noticed."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
