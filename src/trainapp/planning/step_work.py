"""What a traced step does: its operations in order, and how often each runs in the whole step."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainapp.planning.checkpointing_times import Delay
from trainapp.planning.operation import LINK, Counts, Operation, operation_of
from trainapp.techniques.checkpointing import CheckpointCounters
from trainapp.torch_operators import ASKS_DEVICE
from trainapp.torch_private import DispatchMode
from trainapp.train.phase import Phase

_BACKWARD = frozenset({Phase.BACKWARD, Phase.BACKWARD_AFTER_UPDATES})
_PER_MICRO_BATCH = frozenset({Phase.DATA, Phase.FORWARD, Phase.LOSS}) | _BACKWARD
_PER_STEP = frozenset(
    {Phase.GRADIENTS, Phase.UNSCALE, Phase.CLIP, Phase.UPDATE_IN_BACKWARD, Phase.COMMIT, Phase.COMMITTED}
)


class Speeds(Protocol):
    """What operations take on a device. view, missing: see `step_time.Speeds`, which measures them."""

    view: float
    missing: set[Operation]

    def measure(self, operations: Counts) -> None:
        """Before any of these is asked for."""

    def busy(self, operation: Operation) -> float:
        """Seconds of the operation itself."""

    def call(self, operation: Operation) -> float:
        """Seconds of Python and autograd from it to the next one."""

    def delay(self, moved: int, selective: bool) -> Delay:
        """What checkpointing adds to a block, and to each of its operations, after one that moves so many bytes."""

    def step(self, busy: float, copying: float, between: float) -> float:
        """Seconds of a step with so many in operations, in copies between host and device, and in Python."""


@dataclass
class MicroBatchWork:
    """Of one micro-batch. blocks, in_blocks: forwards of checkpointed blocks, and the operations in them and in their
    recomputation, keyed by whether the checkpointing is selective.
    """

    operations: Counts = field(default_factory=Counter)
    views: int = 0
    blocks: Counter[bool] = field(default_factory=Counter)
    in_blocks: dict[bool, Counts] = field(default_factory=lambda: {False: Counter(), True: Counter()})

    def between_operations(self, speeds: Speeds) -> float:
        """Seconds in Python and autograd."""
        seconds = _total(self.operations, speeds.call) + self.views * speeds.view
        for selective, operations in self.in_blocks.items():
            if number := operations.total():
                mean = sum(operation.moved * count for operation, count in operations.items()) // number
                seconds += self.blocks[selective] * speeds.delay(mean, selective).block
                seconds += sum(
                    count * speeds.delay(operation.moved, selective).operation
                    for operation, count in operations.items()
                )
        return seconds


@dataclass
class Work:
    """The operations of a step, by traced micro-batch and per step.

    The trace has taken the first ones of the step's `micro_batches`, with this share of its samples. Later ones are
    like the last of these: the first one adds no gradients to others.
    """

    traced: list[MicroBatchWork] = field(default_factory=lambda: [MicroBatchWork()])
    per_step: Counts = field(default_factory=Counter)
    share: float = 1.0
    micro_batches: int = 1

    @property
    def per_micro_batch(self) -> Counts:
        """Of all traced micro-batches together."""
        return sum((one.operations for one in self.traced), Counter())

    def cannot_run(self, speeds: Speeds) -> bool:
        """Whether the device lacks a kernel, as far as operations have been run for real."""
        return not speeds.missing.isdisjoint([*self.per_micro_batch, *self.per_step])

    def seconds(self, speeds: Speeds, micro_batches: int | None = None) -> float:
        """Of the whole step. micro_batches: as if there were so many, of larger or smaller size."""
        speeds.measure(self.per_micro_batch + self.per_step)
        split = [_split(one) for one in self.traced]
        busy = [_total(own, speeds.busy) for own, _ in split]
        copying = [_total(copies, speeds.busy) for _, copies in split]
        between = [one.between_operations(speeds) for one in self.traced]
        return speeds.step(
            _continued(busy, len(busy) / self.share) + _total(self.per_step, speeds.busy),
            _continued(copying, len(busy) / self.share),
            _continued(between, micro_batches or max(self.micro_batches, len(busy)))
            + _total(self.per_step, speeds.call),
        )


def _split(work: MicroBatchWork) -> tuple[Counts, Counts]:
    """Operations, and copies between host and device, which run beside them. The optimizer's step waits for its own."""
    copies = Counter({one: count for one, count in work.operations.items() if one.place == LINK})
    return work.operations - copies, copies


def _total(counts: Counts, price: Callable[[Operation], float]) -> float:
    return sum(count * price(operation) for operation, count in counts.items())


def _continued(values: list[float], number: float) -> float:
    """The sum of so many values, whose first ones are known: the others are like the last."""
    if number < len(values):
        return sum(values) * number / len(values)
    return sum(values) + (number - len(values)) * values[-1]


class WorkCounter(DispatchMode):
    """While active, adds the operations of a step to `work`. phase: where the step is; only some phases count."""

    def __init__(self, phase: Callable[[], Phase | None]):
        super().__init__()
        self._phase = phase
        self.restarted()

    def restarted(self) -> "WorkCounter":
        """This counter, reset."""
        self.work = Work()
        self._before: Phase | None = None
        self._blocks = CheckpointCounters.blocks
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        phase = self._phase()
        if phase not in _PER_MICRO_BATCH | _PER_STEP:
            return result
        if self._before in _BACKWARD and phase in _PER_MICRO_BATCH - _BACKWARD:
            self.work.traced.append(MicroBatchWork())
        self._before = phase
        one, selective = self.work.traced[-1], CheckpointCounters.selecting > 0
        one.blocks[selective] += CheckpointCounters.blocks - self._blocks
        self._blocks = CheckpointCounters.blocks
        operation = None if func.is_view else operation_of(func, args, kwargs or {}, result)
        if operation is None or operation.is_view:
            one.views += phase in _PER_MICRO_BATCH
        elif phase in _PER_STEP:
            self.work.per_step[operation] += 1
        else:
            one.operations[operation] += 1
            if CheckpointCounters.inside:
                one.in_blocks[selective][operation] += 1
        return result
