"""What a traced step does: its operations in order, and how often each runs in the whole step."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainapp.memory.levers.activation_checkpointing import Selecting
from trainapp.plan.operation import Operation, operation_of
from trainapp.torch_operators import ASKS_DEVICE
from trainapp.torch_private import DispatchMode
from trainapp.train.phase import Phase

_BACKWARD = frozenset({Phase.BACKWARD, Phase.BACKWARD_AFTER_UPDATES})
_PER_MICRO_BATCH = frozenset({Phase.DATA, Phase.FORWARD, Phase.LOSS}) | _BACKWARD
_PER_STEP = frozenset(
    {Phase.GRADIENTS, Phase.UNSCALE, Phase.CLIP, Phase.UPDATE_IN_BACKWARD, Phase.COMMIT, Phase.COMMITTED}
)
Counts = Counter[Operation]


class Prices(Protocol):
    """What operations cost on a device; see `step_time.Speeds`."""

    view: float  # seconds of an operation that moves nothing
    selection: float  # seconds by which selective checkpointing delays each operation of a block

    def measure(self, operations: Counts) -> None:
        """Have them all measured."""

    def busy(self, operation: Operation) -> float:
        """Seconds of the operation itself."""

    def call(self, operation: Operation) -> float:
        """Seconds until the next one, in Python and autograd."""


@dataclass
class Work:
    """The operations of a step, by traced micro-batch and per step, and the number of views beside them.

    The trace has taken the first ones of the step's `micro_batches`, with this share of its samples. Later ones are
    like the last of these: the first one adds no gradients to others.
    """

    by_micro_batch: list[Counts] = field(default_factory=lambda: [Counter()])
    per_step: Counts = field(default_factory=Counter)
    views: list[int] = field(default_factory=lambda: [0])  # by traced micro-batch
    selected: list[int] = field(default_factory=lambda: [0])  # those that pass through selective checkpointing
    share: float = 1.0
    micro_batches: int = 1

    @property
    def per_micro_batch(self) -> Counts:
        """Of all traced micro-batches together."""
        return sum(self.by_micro_batch, Counter())

    def seconds(self, prices: Prices, micro_batches: int | None = None) -> float:
        """Of the whole step. micro_batches: as if there were so many, of larger or smaller size."""
        prices.measure(self.per_micro_batch + self.per_step)
        busy = [_total(counts, prices.busy) for counts in self.by_micro_batch]
        calls = [
            _total(counts, prices.call) + views * prices.view + selected * prices.selection
            for counts, views, selected in zip(self.by_micro_batch, self.views, self.selected, strict=True)
        ]
        traced = len(busy)
        once = _total(self.per_step, prices.busy) + _total(self.per_step, prices.call)
        return (
            _continued(busy, traced / self.share)
            + _continued(calls, micro_batches or max(self.micro_batches, traced))
            + once
        )


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
        self.afresh()

    def afresh(self) -> "WorkCounter":
        """Itself, with nothing counted yet."""
        self.work = Work()
        self._before: Phase | None = None
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        phase = self._phase()
        if func.namespace == "prim" or phase not in _PER_MICRO_BATCH | _PER_STEP:  # prim asks for the device only
            return result
        work = self.work
        if self._before in _BACKWARD and phase in _PER_MICRO_BATCH - _BACKWARD:
            work.by_micro_batch.append(Counter())
            work.views.append(0)
            work.selected.append(0)
        self._before = phase
        work.selected[-1] += bool(Selecting.active)
        operation = None if func.is_view else operation_of(func, args, kwargs or {}, result)
        if operation is None or operation.is_view:
            work.views[-1] += phase in _PER_MICRO_BATCH
        elif phase in _PER_MICRO_BATCH:
            work.by_micro_batch[-1][operation] += 1
        else:
            work.per_step[operation] += 1
        return result
