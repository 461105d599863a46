"""Why a task's results could not be compared, or say nothing about it."""

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """A reason, in words that continue "not compared: ". `{}` stands for the obstacle's detail."""

    # Of the settings, the task or the model: the same on all ranks, and known before any sample is read.
    SWITCHED_OFF = "train.check_loss=false"
    EMBEDDINGS = "an embedding loss compares the samples of the whole step"
    WHOLE_BATCH = "the task declares whole_batch, its batch is never split"
    RESUMED_STREAM = "a resumed run does not read its stream from the start"
    NO_VALUES = "parameters have no values yet (parallel.fsdp.meta_init)"

    # Of the samples.
    ONE_SAMPLE = "fewer than two samples"
    NOT_FETCHED = "the first samples cannot be fetched: {}"
    ONE_SHAPE = "the first {} samples have one shape"
    ALWAYS_JOINED = "batches are their halves joined, whatever their shapes"
    NEVER_JOINED = "a batch is not its halves joined"
    RANDOM_COLLATE = "the data's `collate` draws random numbers"
    OTHER_VALUES = "a batch has other values when it is fetched again"

    # Of the calls.
    ERROR = "{}"
    REFUSES_PART = "the task or the model refuses {}"
    NOT_FINITE = "the loss or its count is not finite"
    NOT_FINITE_ALONE = "the loss of a single sample is not finite"
    WRITES_STATE = "the forward writes state ({})"
    DRAWS_OUTSIDE_TORCH = "draws from Python's or NumPy's generator"
    UNKNOWN_DRAWS = "draws whose samples are not known"
    NOT_REPRODUCIBLE = "two calls with the same samples differ"


@dataclass(frozen=True)
class Obstacle:
    """What kept a comparison from being made, or its result from saying anything. `str` tells the reason."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return self.reason.value.replace("{}", self.detail)
