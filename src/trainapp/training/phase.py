"""The phases of a step, which recovery needs to know after an error."""

from enum import Enum
from typing import NamedTuple

from trainapp.checkpoint.train_state import Update

_BEFORE_COMMIT = (True, True, True)


class Phase(str, Enum):
    """The phases of a run. OOM reports use these values.

    can_be_undone: nothing of the step has changed yet, so a rollback leaves no trace. is_voted_on: whether an OOM vote
    can abort this phase on all ranks. depends_on_size: a smaller micro-batch needs less memory. is_partial: parameters
    and optimizer may be partially updated, so only a checkpoint is safe.
    """

    can_be_undone: bool
    is_voted_on: bool
    depends_on_size: bool
    is_partial: bool

    def __new__(cls, value: str, undone: bool = False, voted: bool = False, sized: bool = False, partial: bool = False):  # type: ignore[no-untyped-def]
        phase = str.__new__(cls, value)
        phase._value_ = value
        phase.can_be_undone, phase.is_voted_on, phase.depends_on_size, phase.is_partial = undone, voted, sized, partial
        return phase

    READ = "read", False, True  # reads a stream's samples for the coming step
    START = "start"
    DATA = "data", *_BEFORE_COMMIT
    FORWARD = "forward", *_BEFORE_COMMIT
    LOSS = "loss", *_BEFORE_COMMIT
    METRIC = "metric", *_BEFORE_COMMIT
    BACKWARD = "backward", *_BEFORE_COMMIT
    GRADIENTS = "gradients", *_BEFORE_COMMIT
    UNSCALE = "unscale", True, False, True  # with shards, torch's own reduction, which no vote can stop
    CLIP = "clip", *_BEFORE_COMMIT
    UPDATE_IN_BACKWARD = "update in backward", False, False, True, True
    BACKWARD_AFTER_UPDATES = "backward after updates", False, False, True, True
    COMMIT = "commit", False, False, True, True
    COMMITTED = "after the commit"  # the step is logged, a larger micro-batch chosen
    WEIGHT_AVERAGE = "weight average"
    EVALUATE = "evaluate", False, True, True
    SAVE = "save"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def updates_in_backward(self) -> bool:
        """Whether a backward that updates parameters has started to do so."""
        return self.is_partial and self is not Phase.COMMIT


class Step(NamedTuple):
    """One update of the next optimizer step."""

    update: Update
    number: int  # from 1; unchanged after a skipped step
    attempt: int  # from 1, including skipped steps: counted by `batch.micro_schedule`
    samples: int  # over all ranks
    is_logged: bool
    is_drawn: bool = False  # whether to plot its memory
    is_rehearsed: bool = False  # whether to check it first: see `training.exactness`
