"""Whether failed workers are restarted, and the errors that they leave for this decision."""

import contextlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainapp.checkpoint.manifest import MANIFEST
from trainapp.files import CHECKPOINTS, LOG, json_object
from trainapp.launch.forwarded_signals import ReceivedSignal
from trainapp.memory.detection import causes
from trainapp.sizes.record import RESTART
from trainapp.torch_private import Restart

# Errors that may have an external, transient cause, such as a full disk or a lost device.
TRANSIENT = (OSError, RuntimeError, EOFError, MemoryError)


class RankError(NamedTuple):
    """Who left an error."""

    rank: int
    is_permanent: bool  # whether restarted workers would meet it again


class RestartPolicy:
    """The decision, after each failure of workers, whether they are restarted.

    They are not after an error that a restart would repeat: one in Python code (see `write_error`), or one that has
    occurred twice at the same step. Nor after a signal.

    A restart with a smaller micro-batch is not counted: a search for the size may need many, and ends at 1 anyway.
    """

    def __init__(self, run_dir: Path, received: ReceivedSignal):
        self.run_dir = run_dir
        self.counted = 0  # failures whose restart counts towards `parallel.max_restarts`
        self.memory_restarts = 0  # restarts with a smaller micro-batch
        self.incurable_error: str | None = None  # that a restart would repeat
        self.rank_errors: dict[str, RankError] = {}  # of the last failure, by their text
        self._received = received
        self._previous_errors: set[str] = set()  # the texts of the failure before
        self._recoveries = 0  # of the last restart with a smaller micro-batch
        take_errors(run_dir)  # discard those of an earlier run
        self._earlier_checkpoints = _checkpoints(run_dir)

    def decide(self) -> Restart:
        """Decide on one failure. Called before the workers are restarted."""
        self.rank_errors = take_errors(self.run_dir)

        # An error that restarted workers would meet again.
        incurable = []
        for text, error in self.rank_errors.items():
            if error.is_permanent or text in self._previous_errors:
                incurable.append(text)
        self.incurable_error = min(incurable, default=None)
        if self.incurable_error is not None or self._received.number:
            return Restart.REFUSED
        self._previous_errors = set(self.rank_errors)

        # Free only if the count has risen: workers that end before they read restart.json would restart forever.
        recoveries = json_object(self.run_dir / RESTART).get("recoveries", 0)
        if recoveries > self._recoveries:
            self._recoveries = recoveries
            self.memory_restarts += 1
            return Restart.FREE
        self._recoveries = 0  # after a crash the workers resume with the checkpoint's, which is lower
        self.counted += 1
        return Restart.COUNTED

    def has_saved(self) -> bool:
        """Return whether the workers have saved a checkpoint, besides those of earlier runs in the directory."""
        return bool(_checkpoints(self.run_dir) - self._earlier_checkpoints)

    def explain(self, error: ChildFailedError) -> str:
        """Return why the run ended, when the workers were not restarted any more."""
        log_hint = f"its log is in {self.run_dir}/ranks (rank 0: {LOG})"
        if self.incurable_error is not None:
            return f"a rank failed with an error that a restart would repeat: {self.incurable_error}; {log_hint}"

        # The first rank that failed, and why.
        rank, failure = error.get_first_failure()
        if self.rank_errors:  # the launcher may first have seen a rank that lost its peer
            reason, rank_error = next(iter(self.rank_errors.items()))
            rank = rank_error.rank
        elif isinstance(failure.message, dict):
            reason = failure.message["message"]  # the traceback is in the rank's log, and elastic has printed it
        else:
            reason = failure.message

        restarts = f"{self.counted - 1} restarts"
        if self.memory_restarts:
            restarts += f" (and {self.memory_restarts} with a smaller micro-batch)"
        return f"rank {rank} failed (exit code {failure.exitcode}) after {restarts}: {reason}; {log_hint}"


def _checkpoints(run_dir: Path) -> set[tuple[str, int]]:
    """Return the names of the checkpoints in a run's directory, and when each was written, in nanoseconds."""
    checkpoints = set()
    for path in (run_dir / CHECKPOINTS).glob(f"step_*/{MANIFEST}"):
        with contextlib.suppress(OSError):  # removed since
            checkpoints.add((path.parent.name, path.stat().st_mtime_ns))
    return checkpoints


def write_error(run_dir: Path, rank: int, error: Exception) -> bool:
    """Leave the error of a rank for `take_errors`, unless it only says that another rank is gone. Return whether it is
    the rank's own.
    """
    first_line, _, _ = str(error).strip().partition("\n")
    # Gloo raises plain RuntimeErrors, such as "Connection closed by peer": only the text tells (2.13).
    is_of_gloo = type(error) is RuntimeError and re.search(r"gloo|nccl|\bpeer\b", first_line, re.IGNORECASE) is not None
    if is_of_gloo or isinstance(error, dist.DistError):
        return False

    # A text that is equal if the same happens again.
    message = re.sub(r"0x[0-9a-f]+", "0x...", first_line)  # addresses differ between processes
    text = f"{type(error).__name__}: {message}"
    for note in getattr(error, "__notes__", []):  # such as the step
        text += f" ({note})"

    is_transient = any(isinstance(cause, TRANSIENT) for cause in causes(error))
    path = run_dir / "ranks" / f"rank_{rank}.error"
    with contextlib.suppress(OSError):  # without the file, all restarts are used
        path.write_text(json.dumps([text, not is_transient]))
    return True


def take_errors(run_dir: Path) -> dict[str, RankError]:
    """Remove the errors that the last workers left, and return them by their text: one line, with the step. A killed
    worker leaves none.
    """
    errors = {}
    for path in sorted((run_dir / "ranks").glob("*.error")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # it was not written in full
            text, is_permanent = json.loads(path.read_text(errors="replace"))
            path.unlink()
            _, _, rank_text = path.stem.rpartition("_")
            rank = int(rank_text)
            errors[str(text)] = RankError(rank, is_permanent is True)
    return errors
