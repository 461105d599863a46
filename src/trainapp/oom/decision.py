"""How an error in an attempt is recovered from, and why in this way. docs/oom.md has the same table in words.

`decide` is the only place that chooses. `run.recover.recover` asks it twice: when the error has been described, and
again after the rollback, which finds out what it could not restore. `recovery.change_size` then chooses the size.
"""

from enum import Enum
from typing import NamedTuple

from trainapp.oom.failure import Failure
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.units import listed


class RecoveryKind(Enum):
    """What is done after an error in an attempt."""

    IN_PLACE = "the attempt is rolled back and the step retried, in this session"
    FROM_CHECKPOINT = "a new session in this process, from the last checkpoint or from the start"
    RESTART = "this worker ends, and the launcher restarts all workers from the last checkpoint"
    END = "this process ends: the command line starts a new one, which continues from the last checkpoint"


class Decision(NamedTuple):
    """How to recover, and the reason."""

    kind: RecoveryKind
    reason: str = ""  # for messages; empty for `IN_PLACE`, which needs none

    @property
    def ends_process(self) -> bool:
        """Whether this process cannot go on."""
        return self.kind in (RecoveryKind.RESTART, RecoveryKind.END)


def decide(failure: Failure, ranks: Ranks) -> Decision:
    """Decide how to recover. Not collective: all ranks that recover together get the same kind, see `undo_attempt`."""
    # The error has broken a part of the process: not even a rollback would work.
    if failure.broken:
        if isinstance(ranks, SingleRank):
            return Decision(RecoveryKind.END, f"{failure.broken} is unusable for the rest of this process")
        return Decision(RecoveryKind.RESTART, f"{failure.broken} is unusable from now on")

    # The others wait in a collective of the step, and cannot be called out of it.
    if failure.must_inform_others:
        obstacle = _why_others_cannot_be_informed(failure, ranks)
        if obstacle:
            return Decision(RecoveryKind.RESTART, obstacle)

    # A forward has written parameters that had no copy, in this rank's own evaluation: the other ranks go on without
    # knowing.
    lost = failure.lost
    if lost and failure.is_local and ranks.world_size > 1:
        return Decision(RecoveryKind.RESTART, f"the forward has written {listed(lost, most=5)}")

    # Parameters are no longer those of before the step: the update has begun to change them, or a forward has.
    if failure.phase.updates_in_backward:
        return Decision(RecoveryKind.FROM_CHECKPOINT, "optimizer.in_backward=true has updated some of the parameters")
    if lost:
        return Decision(
            RecoveryKind.FROM_CHECKPOINT,
            f"the forward has written {listed(lost)}, of which there was no copy (from now on there is)",
        )
    if failure.phase.is_partly_applied:
        return Decision(RecoveryKind.FROM_CHECKPOINT, "the parameters may be half updated")

    # Everything else can be undone.
    return Decision(RecoveryKind.IN_PLACE)


def _why_others_cannot_be_informed(failure: Failure, ranks: Ranks) -> str:
    """Return why no vote can call the other ranks out of the step; empty if one can."""
    if failure.phase.is_partly_applied:
        return "inside the commit"
    if not failure.phase.is_voted_on:
        return f"ranks do not vote in the phase {failure.phase}"
    if not ranks.votes_enabled:
        return f"ranks do not vote {ranks.why_not_voting}"
    return ""
