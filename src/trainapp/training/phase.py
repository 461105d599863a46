"""The phases of a step, which recovery needs to know after an error."""

from enum import Enum
from typing import NamedTuple

from trainapp.checkpoint.train_state import Update


class Phase(str, Enum):
    """The phases of a run. OOM reports use these values."""

    READ = "read"  # reads a stream's samples for the coming step
    START = "start"
    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    METRIC = "metric"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    UNSCALE = "unscale"
    CLIP = "clip"
    UPDATE_IN_BACKWARD = "update in backward"
    BACKWARD_AFTER_UPDATES = "backward after updates"
    COMMIT = "commit"
    COMMITTED = "after the commit"  # the step is logged, a larger micro-batch chosen
    WEIGHT_AVERAGE = "weight average"
    EVALUATE = "evaluate"
    SAVE = "save"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def can_be_undone(self) -> bool:
        """Whether nothing of the step has changed yet, so that a rollback leaves no trace."""
        return self in _BEFORE_COMMIT

    @property
    def begins_step(self) -> bool:
        """Whether the step that comes next has begun, but nothing of it is computed yet."""
        return self in (Phase.READ, Phase.START)

    @property
    def is_voted_on(self) -> bool:
        """Whether an OOM vote can abort this phase on all ranks: not torch's own reduction in UNSCALE, with shards."""
        return self is not Phase.UNSCALE and self in (*_BEFORE_COMMIT, Phase.READ, Phase.EVALUATE)

    @property
    def depends_on_size(self) -> bool:
        """Whether a smaller micro-batch needs less memory."""
        return self in (*_BEFORE_COMMIT, Phase.EVALUATE) or self.is_partly_applied

    @property
    def is_partly_applied(self) -> bool:
        """Whether the update has begun to change parameters or progress and is not finished: only a checkpoint
        restores them.
        """
        return self in _COMMIT_PHASES

    @property
    def updates_in_backward(self) -> bool:
        """Whether a backward that updates parameters has started to do so."""
        return self.is_partly_applied and self is not Phase.COMMIT


_COMMIT_PHASES = (Phase.UPDATE_IN_BACKWARD, Phase.BACKWARD_AFTER_UPDATES, Phase.COMMIT)
_BEFORE_COMMIT = (
    Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.METRIC, Phase.BACKWARD, Phase.GRADIENTS, Phase.UNSCALE, Phase.CLIP,
)  # fmt: skip


class UpdateContext(NamedTuple):
    """One update of the next optimizer step; with several optimizers, a step has several updates."""

    update: Update
    step_number: int  # from 1; unchanged after a skipped step
    batch_number: int  # from 1, including skipped steps: counted by `batch.micro_schedule`
    samples: int  # over all ranks
    is_logged: bool
    plots_memory: bool = False
    checks_exactness: bool = False  # whether to check it first: see `training.exactness`
