"""Where a step is: its phase, and what recovery needs to know when it fails."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from trainapp.checkpoint.train_state import Update


class Phase(str, Enum):
    """The phases of a run, in the order of a step. Incidents name them by their values."""

    WEIGHT_AVERAGE = "weight average"
    EVALUATE = "evaluate"
    SAVE = "save"
    READ = "read"  # a stream's samples of the coming step
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
    COMMITTED = "committed"
    SEARCH = "search"
    LOG = "log"

    def __str__(self) -> str:
        return self.value

    @property
    def can_be_undone(self) -> bool:
        """Whether the step has not changed anything yet: rolling back leaves no trace."""
        return self in _BEFORE_COMMIT

    @property
    def is_partial(self) -> bool:
        """Whether parameters and optimizer may be half updated: only a checkpoint is safe."""
        return self is Phase.COMMIT or self.updates_in_backward

    @property
    def updates_in_backward(self) -> bool:
        """Whether a backward that updates parameters has begun to do so."""
        return self in (Phase.UPDATE_IN_BACKWARD, Phase.BACKWARD_AFTER_UPDATES)

    @property
    def is_voted_on(self) -> bool:
        """Whether a vote, where votes are held, makes all ranks leave it: torch unscales shards with a reduction of its
        own that no vote can stop.
        """
        return (self.can_be_undone and self is not Phase.UNSCALE) or self in (Phase.READ, Phase.EVALUATE)

    @property
    def depends_on_size(self) -> bool:
        """Whether a smaller micro-batch needs less memory here."""
        return self in _BEFORE_COMMIT or self.is_partial or self is Phase.EVALUATE


_BEFORE_COMMIT = frozenset(
    {
        Phase.DATA,
        Phase.FORWARD,
        Phase.LOSS,
        Phase.METRIC,
        Phase.BACKWARD,
        Phase.GRADIENTS,
        Phase.UNSCALE,
        Phase.CLIP,
    }
)


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
