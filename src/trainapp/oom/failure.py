"""A failed attempt at a step: what it was, and how it is recovered from."""

from dataclasses import dataclass, field

from trainapp.memory.live_tensors import Category
from trainapp.sizes.failures import ErrorKind
from trainapp.sizes.search import FailedAllocation
from trainapp.training.phase import Phase

# What is in memory before a micro-batch, whatever its size.
RESIDENT = (
    Category.PARAMETERS,
    Category.OPTIMIZER_STATE,
    Category.BUFFERS,
    Category.WEIGHT_AVERAGE,
    Category.GRADIENTS,
    Category.COMMUNICATION_BUFFERS,
)

UPDATE_PHASES = (Phase.GRADIENTS, Phase.UNSCALE, Phase.CLIP, Phase.COMMIT)  # no micro-batch is in memory


@dataclass(frozen=True)
class Recovery:
    """The answer to a failure: the micro-batch size of the next attempt, and what is done, in words."""

    old_size: int = 0  # the largest micro-batch of the failed attempt
    new_size: int = 0  # that of the next attempt
    action: str = ""
    fewest_samples: int = 0  # of every micro-batch from now on, after an error for too few; 0 after any other
    is_constant: bool = False  # whether fewer samples have asked for the same

    @property
    def has_size(self) -> bool:
        """Whether there is a size to try next: otherwise no other one can help."""
        return self.new_size > 0


NO_RECOVERY = Recovery()


@dataclass
class Failure:
    """A failed attempt at a step. Sizes are bytes.

    `report.describe` makes it while the error is handled; what a field's comment gives to another function is found
    out later. Plain values only: the error and its frames would keep every tensor of the failed step alive.
    """

    # Where it failed, and what was in memory.
    step: int
    phase: Phase
    module: str
    message: str
    requested: int | None
    used: int
    limit: int
    by_category: dict[Category, int]
    trace: str
    rank: int = 0

    # Which ranks it concerns.
    is_local: bool = False  # whether no other rank waits for this one, so that none needs to be informed
    by_peer: bool = False  # another rank has failed, not this one
    others_are_informed: bool = False  # whether all ranks have left the step, after a vote (`abort_on_all_ranks`)
    failed_ranks: list[int] = field(default_factory=list)  # empty if no other rank was informed (the same)

    # What kind of error, and its circumstances.
    kind: ErrorKind = ErrorKind.OUT_OF_MEMORY  # of a peer's error, too, once the ranks have exchanged it
    host: bool = False  # the host ran out, not a device or `memory.limit`
    swallowed: bool = False  # the caller caught the error
    update: str = ""  # name of the step's update; empty if it has only one, and between steps
    resident: Category | None = None  # what exceeded the limit before any micro-batch, by itself
    accumulates: bool = False  # whether gradients of earlier micro-batches were in memory
    samples: int = 0  # in the current micro-batch
    elements: int = 0  # in the current micro-batch; 0 if unknown
    broken: str | None = None  # what the error has broken for the rest of this process
    technique: str = ""  # the one that the model refuses, if it does

    # What became of it.
    lost: list[str] = field(
        default_factory=list
    )  # parameters that a forward has written, without a copy (`undo_attempt`)
    recovery: Recovery = NO_RECOVERY  # (`change_size`, `end_process`)
    seconds_lost: float = 0.0  # by the attempt and its recovery (`report`)

    # For a picture.
    events: list[tuple[int, int]] = field(default_factory=list, repr=False)
    categories: dict[int, Category] = field(default_factory=dict, repr=False)  # by storage number

    @property
    def location(self) -> str:
        """What asked for memory: a phase, or a category that is there before any."""
        return self.resident.label if self.resident else str(self.phase)

    @property
    def failed_allocation(self) -> FailedAllocation | None:
        """What was asked for, for the search."""
        is_size_independent = self.resident is not None or not self.phase.depends_on_size
        if self.requested is None and not is_size_independent:
            return None
        location = f"{self.phase} {self.module}"
        if self.accumulates:
            location += " with gradients"
        return FailedAllocation(
            location,
            self.samples,
            self.elements,
            self.requested or 0,
            self.used,
            self.limit,
            is_size_independent,
            is_optimizer_update=self.phase in UPDATE_PHASES,
        )

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out."""
        return self.kind is ErrorKind.OUT_OF_MEMORY

    @property
    def must_inform_others(self) -> bool:
        """Whether other ranks are in the step and do not know yet that this one has left it."""
        return not (self.is_local or self.by_peer or self.others_are_informed)

    @property
    def evaluating(self) -> bool:
        """Whether it happened in evaluation, which has its own micro-batch size."""
        return self.phase is Phase.EVALUATE
