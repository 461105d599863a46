"""Where a step is: its phase, and what recovery needs to know when it fails."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from trainapp.checkpoint.train_state import Update

_BEFORE_COMMIT = (True, True, True)


class Phase(str, Enum):
    """The phases of a run; OOM reports use their values.

    can_be_undone: nothing of the step has changed yet: a rollback leaves no trace. is_voted_on: a vote, if votes are
    held, makes all ranks leave it. depends_on_size: a smaller micro-batch needs less memory. is_partial: parameters and
    optimizer may be partially updated: only a checkpoint is safe.
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

    READ = "read", False, True  # a stream's samples of the coming step
    START = "start"
    DATA = "data", *_BEFORE_COMMIT
    FORWARD = "forward", *_BEFORE_COMMIT
    LOSS = "loss", *_BEFORE_COMMIT
    METRIC = "metric", *_BEFORE_COMMIT
    BACKWARD = "backward", *_BEFORE_COMMIT
    GRADIENTS = "gradients", *_BEFORE_COMMIT
    UNSCALE = "unscale", True, False, True  # of shards: a reduction of torch's own, which no vote can stop
    CLIP = "clip", *_BEFORE_COMMIT
    UPDATE_IN_BACKWARD = "update in backward", False, False, True, True
    BACKWARD_AFTER_UPDATES = "backward after updates", False, False, True, True
    COMMIT = "commit", False, False, True, True
    COMMITTED = "committed"
    LOG = "log"
    SEARCH = "search"
    WEIGHT_AVERAGE = "weight average"
    EVALUATE = "evaluate", False, True, True
    SAVE = "save"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def updates_in_backward(self) -> bool:
        """Whether a backward that updates parameters has begun to do so."""
        return self.is_partial and self is not Phase.COMMIT


class Step(NamedTuple):
    """The coming optimizer step, and which of its updates: with one optimizer, there is one."""

    update: Update
    number: int  # from 1; the same again after a skipped step
    attempt: int  # from 1, skipped steps included: what `batch.micro_schedule` counts
    samples: int  # over all ranks
    is_logged: bool
    is_drawn: bool  # plot its memory


@dataclass
class Attempt:
    """The step or evaluation in progress: what recovery needs to know when it fails."""

    phase: Phase = Phase.START
    started: float = 0.0  # time.monotonic()
    retried: int = -1  # the last step that was retried at the same size
    refused: int = 0  # allocations that the device's allocator had refused when it began
    step: Step | None = None  # the last one that was begun
    micro_batches: int = 0  # begun in it
    logged: dict[str, float] = field(default_factory=dict)  # metrics of its finished updates
    rehearsals: int = 0  # updates yet to be checked by `train.check_exactness`
