"""How a trial ends: judged by the exit status of its job, by result.json, and by what the job has printed."""

import itertools
import signal
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from trainapp.config.command_line import message_in
from trainapp.errors import NOT_FINITE, OUT_OF_MEMORY, UserError
from trainapp.files import PLAN, RESULT, json_object
from trainapp.report.run_files import state_of
from trainapp.run import directory
from trainapp.signals import TO_BE_CONTINUED

CONSOLE_LOG = "console.log"  # in a job's directory: what its processes have printed
START_MARK = "== started "  # in that log, before what each process prints
NOT_OUR_CHILD = -1000  # exit status of a process that this one has not started
# What is recorded of a result.json, and the columns of leaderboard.csv.
FACTS = (
    "metric",
    "direction",
    "objective",
    "objective_note",
    "best_objective",
    "best_step",
    "steps",
    "seconds",
    "micro_size",
    "accumulation",
    "oom_restarts",
    "peak_memory_bytes",
    "ended",
    "checkpoint",
)
# Signals that end a job from outside: it may continue.
_ENDING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class TrialState(str, Enum):
    """The states of a trial. The journal, the table and the terminal use these values."""

    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"  # at a rung; continues if it is promoted
    STOPPED = "stopped"  # by a signal or a time limit; continues with the sweep
    FINISHED = "finished"
    FAILED = "failed"
    INFEASIBLE = "infeasible"  # does not fit in memory

    def __str__(self) -> str:
        return str(self.value)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a result: it continues only when it is asked to be retried."""
        return self in (TrialState.FAILED, TrialState.INFEASIBLE)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended for good, with a result or without one."""
        return self is TrialState.FINISHED or self.has_failed


class Outcome(NamedTuple):
    """How a job's process ended. The fields are those of the journal's event `end`."""

    state: TrialState
    error: str  # why it has not finished; empty if that is not known, or needs no words
    facts: dict[str, Any]  # see `facts_of`
    error_kind: str = ""  # as in `errors`; empty if it is not known


def refused(error: UserError) -> Outcome:
    """Return the outcome of a job that could not start because of this error."""
    message = "; ".join(str(error).splitlines())
    return Outcome(TrialState.FAILED, message, {}, error.kind)


def infeasible_by_plan(size_text: str) -> Outcome:
    """Return the outcome of a job that does not fit, by its plan. size_text: what it needs, and of how much."""
    error = f"out of memory by its plan at micro-batch 1: it needs {size_text}"
    return Outcome(TrialState.INFEASIBLE, error, {}, OUT_OF_MEMORY)


def judge(folder: Path, mode: str, status: int, is_held: bool, launcher_error: str = "") -> Outcome:
    """Return how a job's process ended, by its exit status and by the files in its directory.

    Args:
        folder: of the job.
        mode: of the job, such as train.
        status: its exit status.
        is_held: whether its trial has not passed the last rung that it has reached.
        launcher_error: the error that a launcher has reported, if any.
    """
    result_name = PLAN if mode == "plan" else RESULT
    result = json_object(folder / result_name)
    facts = facts_of(result)
    if _has_finished(mode, status, result):
        return Outcome(TrialState.FINISHED, "", facts)

    # Interrupted: at a rung, or by a signal.
    error = _error_of(folder / CONSOLE_LOG, status, launcher_error)
    if _may_continue(status, error):
        if is_held:
            return Outcome(TrialState.PAUSED, "", facts)
        if status in (0, TO_BE_CONTINUED):  # in good order
            return Outcome(TrialState.STOPPED, "", facts)
        return Outcome(TrialState.STOPPED, error, facts)

    # Ended by an error of its own.
    error_kind = _kind_of(error, status, result)
    state = TrialState.INFEASIBLE if error_kind == OUT_OF_MEMORY else TrialState.FAILED
    return Outcome(state, error, facts, error_kind)


def was_lost(outcome: Outcome, status: int) -> bool:
    """Return whether a job was killed, or started by an earlier process of the sweep and ended before its end."""
    return outcome.state is TrialState.STOPPED and status < 0


def facts_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the journal records of a result.json."""
    return {name: result[name] for name in FACTS if name in result}


def kind_by_words(error: str) -> str:
    """Return the kind of an error by its message: earlier versions recorded no kind, and a run that has no session and
    no result.json does not either.
    """
    if error.startswith("out of memory"):
        return OUT_OF_MEMORY
    return NOT_FINITE if "not finite" in error else ""


def _has_finished(mode: str, status: int, result: dict[str, Any]) -> bool:
    """Return whether a job has finished: by the exit status where it is known, otherwise by the files alone."""
    if status != NOT_OUR_CHILD:
        return status == 0 and not result.get("stopped")
    if mode == "train":
        return state_of(result) == TrialState.FINISHED
    return bool(result)


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
    _, _, text_of_process = text.rpartition(START_MARK)
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
