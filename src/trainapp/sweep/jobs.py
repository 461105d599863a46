"""The processes of a sweep's jobs: started with a share of the machine, found again after the sweep itself was killed.

Each leads a session of its own, so that a terminal's Ctrl-C reaches the sweep alone, which passes it on once. What it
prints goes to `console.log` in its directory.
"""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainapp.config.command_line import message_in
from trainapp.errors import OUT_OF_MEMORY, UserError
from trainapp.files import PLAN, RESULT, json_object
from trainapp.hooks.rungs import JOB
from trainapp.launch.environment import SWEEP_SHARE
from trainapp.report.run_files import state_of
from trainapp.run import directory
from trainapp.signals import TO_BE_CONTINUED
from trainapp.sweep.journal import Trial, facts_of, kind_by_words
from trainapp.sweep.slots import SHARE, Slot

CONSOLE_LOG = "console.log"
NOT_OUR_CHILD = -1000  # exit status of a process that this one has not started
# Signals that end a job from outside: it may continue.
_ENDING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_START_MARK = "== started "  # in the log, before what each process prints


class MemoryNeed(NamedTuple):
    """What a plan says about a job's memory."""

    bytes: int  # that the job needs
    device_bytes: int  # that all jobs of a device may use together
    micro_size: int
    is_infeasible: bool  # it does not fit at micro-batch 1


def plan_memory(command: Sequence[str], folder: Path, slot: Slot) -> MemoryNeed | None:
    """Plan a job in a process, which takes some seconds. Return None if there is no estimate.

    Args:
        command: of mode=plan, in that folder.
        folder: of the plan.
        slot: of the job.
    """
    # Remove an earlier plan: this one may fail.
    plan_path = folder / PLAN
    plan_path.unlink(missing_ok=True)
    environment = _environment(folder, [], slot, slot.threads)
    subprocess.run(command, capture_output=True, env=environment)
    facts = json_object(plan_path)
    peak = facts.get("peak_bytes")
    if peak is None:
        return None

    # The job gets its peak plus the plan's margin.
    limit = facts["limit_bytes"]
    peak_with_margin = peak * (1 + facts["margin"])
    return MemoryNeed(
        bytes=int(peak_with_margin) + 1,
        device_bytes=int(SHARE * limit),
        micro_size=facts["micro_size"],
        is_infeasible=not facts["largest_micro_size"] and peak > limit,
    )


@dataclass
class Orphan:
    """A job started by an earlier process of the sweep: its processes on this machine, and its lock, which also tells
    whether it runs on another.
    """

    folder: Path
    processes: list[psutil.Process] = field(default_factory=list)
    gpus: str | None = None  # as in CUDA_VISIBLE_DEVICES

    def poll(self) -> int | None:
        """Return NOT_OUR_CHILD once it has ended, None while it runs."""
        is_running = any(map(_is_alive, self.processes)) or directory.is_in_use(self.folder)
        if is_running:
            return None
        return NOT_OUR_CHILD

    def terminate(self) -> None:
        """Send SIGTERM to its first process, if that is on this machine."""
        with contextlib.suppress(psutil.Error, IndexError):
            self.processes[0].terminate()


class Launched:
    """A job that a launcher of Hydra runs, in a thread that waits for it. No signal reaches it from here."""

    def __init__(self, launch: Callable[[], Any]):
        self.launch = launch
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for returned in self.launch():
                _ = returned.return_value  # raises the job's error
        except UserError as error:
            self.error = str(error)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"

    def poll(self) -> int | None:
        """Return 1 after an error, 0 after none, None while it runs."""
        if self._thread.is_alive():
            return None
        return 1 if self.error else 0

    def terminate(self) -> None:
        """Do nothing: it is left to run."""


# `poll()` returns the exit status, NOT_OUR_CHILD if another process has started it, and None while it runs.
# `terminate()` asks it to save and end, by SIGTERM: before its own handler, SIGINT would look like an error.
Job = subprocess.Popen[bytes] | Orphan | Launched


def start(
    command: Sequence[str], sweep_overrides: Sequence[str], folder: Path, slot: Slot, threads: int | None
) -> subprocess.Popen[bytes]:
    """Start a job in its slot.

    Args:
        command: of the job.
        sweep_overrides: the overrides among the command's that the sweep adds.
        folder: of the job.
        slot: whose cores and GPUs it gets.
        threads: of torch; None: torch's choice.
    """
    environment = _environment(folder, sweep_overrides, slot, threads)
    keep_to_cores = None
    if slot.cores:
        keep_to_cores = functools.partial(os.sched_setaffinity, 0, slot.cores)

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CONSOLE_LOG).open("ab") as log:
        started_at = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(f"{_START_MARK}{started_at}\n".encode())
        log.flush()  # before the process prints into the same file
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=keep_to_cores,
        )


def _environment(folder: Path, sweep_overrides: Sequence[str], slot: Slot, threads: int | None) -> dict[str, str]:
    """Return the environment variables of a job's process."""
    variables = dict(os.environ)
    variables[JOB] = str(folder)
    variables[SWEEP_SHARE] = "\n".join(sweep_overrides)

    # Set by `__main__`: with it, a user's mistake would come with its traceback.
    variables.pop("HYDRA_FULL_ERROR", None)

    # The job's share of the machine.
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
        variables["MKL_NUM_THREADS"] = str(threads)
    if slot.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    return variables


def forget_failure(folder: Path) -> None:
    """Remove the result of a job that failed and starts again: if it fails before it has one, it is not that one."""
    if state_of(json_object(folder / RESULT)) == "failed":
        (folder / RESULT).unlink()


def find_orphans(folders: Iterable[Path]) -> dict[Path, Orphan]:
    """Return the jobs in these directories, with their processes that still run, the first one first."""
    orphans = {folder: Orphan(folder) for folder in folders}
    if not orphans:
        return orphans

    # A job's processes have its directory in their environment. Other users' environments cannot be read.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            folder = Path(variables.get(JOB, ""))
            orphan = orphans.get(folder)
            if orphan is not None and process.pid != os.getpid():
                orphan.processes.append(process)
                orphan.gpus = variables.get("CUDA_VISIBLE_DEVICES")
    for orphan in orphans.values():
        orphan.processes.sort(key=lambda process: process.create_time())
    return orphans


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Outcome(NamedTuple):
    """How a job's process ended. state, error, facts, error_kind: as in `Trial`."""

    state: str
    error: str
    facts: dict[str, Any]
    error_kind: str = ""


def outcome(trial: Trial, mode: str, status: int, launcher_error: str = "") -> Outcome:
    """Return how a job's process ended, judged by its exit status and by the files in its directory.

    Args:
        trial: of the job.
        mode: of the job, such as train.
        status: its exit status.
        launcher_error: the error that a launcher has reported, if any.
    """
    folder = Path(trial.folder)
    result_name = PLAN if mode == "plan" else RESULT
    result = json_object(folder / result_name)
    facts = facts_of(result)

    # Finished: by the exit status where it is known, otherwise by the files alone.
    if status != NOT_OUR_CHILD:
        has_finished = status == 0 and not result.get("stopped")
    elif mode == "train":
        has_finished = state_of(result) == "finished"
    else:
        has_finished = bool(result)
    if has_finished:
        return Outcome("finished", "", facts)

    # Interrupted: at a rung, or by a signal.
    error = _error_of(folder / CONSOLE_LOG, status, launcher_error)
    if _may_continue(status, error):
        if trial.is_held:
            return Outcome("paused", "", facts)
        is_orderly = status in (0, TO_BE_CONTINUED)
        return Outcome("stopped", "" if is_orderly else error, facts)

    # Ended by an error of its own.
    error_kind = _kind_of(error, status, result)
    state = "infeasible" if error_kind == OUT_OF_MEMORY else "failed"
    return Outcome(state, error, facts, error_kind)


def _error_of(log: Path, status: int, launcher_error: str) -> str:
    """Return why a process has not finished; empty if it is not known."""
    if status == NOT_OUR_CHILD:
        return ""
    signal_number = _signal_number(status)
    if status < 0 or signal_number in _ENDING_SIGNALS:
        return f"ended by {signal.Signals(signal_number).name}"
    if launcher_error or status == 0:
        return launcher_error
    return _last_message(log)


def _may_continue(status: int, error: str) -> bool:
    """Return whether a job that has not finished was interrupted, not ended by an error of its own."""
    if status in (0, NOT_OUR_CHILD, TO_BE_CONTINUED) or _signal_number(status) in _ENDING_SIGNALS:
        return True
    return directory.IN_USE in error  # another process continues its run


def _kind_of(error: str, status: int, result: dict[str, Any]) -> str:
    """Return the kind of the error of a failed job, empty if it is not known.

    Args:
        error: its message.
        status: the job's exit status.
        result: its result.json.
    """
    if status == UserError.exit_code:
        return UserError.kind
    return result.get("error_kind") or kind_by_words(error)


def _signal_number(status: int) -> int:
    """Return the signal of an exit status, where one has ended the process. A shell, and a handler, add 128."""
    return -status if status < 0 else status - 128


def _last_message(log: Path) -> str:
    """Return the last message in the output of a job's last process: the one for the user, or that of a traceback."""
    text = ""
    if log.exists():
        text = log.read_text(errors="replace")
    _, _, text_of_process = text.rpartition(_START_MARK)
    lines = text_of_process.splitlines()[1:]  # the first one has the time

    # The message for the user, or its first two lines.
    message = "; ".join(message_in(lines)[:2])
    if message:
        return message

    # Of a traceback, the line after the indented ones; notes may follow it.
    error_lines = []
    for previous, line in itertools.pairwise(lines):
        if previous.startswith(" ") and not line.startswith(" "):
            error_lines.append(line)
    candidates = error_lines or lines or ["no message"]
    return candidates[-1].strip()
