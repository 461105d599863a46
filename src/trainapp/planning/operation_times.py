"""How long operations take in a step: each runs once per round, between the others.

In a loop of its own an operation finds its arguments, its code and the memory of its last result in the caches, which
made small ones seem up to eight times as fast as in a step.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainapp.planning.operation import Operation
from trainapp.techniques.checkpointing import CheckpointCounters
from trainapp.torch_private import DispatchMode

ROUNDS = 4  # the same for every operation: a minimum over more rounds is lower
CACHES = 2**24  # bytes of which little else remains in the caches of a core
_EVICTED = (0, 2**18, 2**20, 2**22, 2**24)  # bytes between two operations


class Clock:
    """CPU time of this thread if torch uses one thread (least disturbed by other processes), else wall-clock time."""

    def __init__(self, device: torch.device):
        self.device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.now = time.thread_time if alone else time.perf_counter
        self.reading = min(self._reading() for _ in range(100))

    def _reading(self) -> float:
        started = self.now()
        return self.now() - started

    def wait(self) -> None:
        """Until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, function: Callable[[], Any]) -> float:
        """Seconds of one call."""
        self.wait()
        started = self.now()
        function()
        self.wait()
        return max(self.now() - started - self.reading, 0.0)

    def best(self, function: Callable[[], Any], patience: float = 0.03) -> float:
        """Seconds per call, of the fastest of some rounds: what disturbs the machine only adds.

        patience: seconds for all rounds; at least two count, or one that alone takes longer.
        """
        function()
        found, number, spent = float("inf"), 1, 0.0
        for turn in range(20):
            seconds = self.once(functools.partial(_repeat, function, number))
            found, spent = min(found, seconds / number), spent + seconds
            if spent > patience and (turn or seconds > 5 * patience):
                break
            number = max(1, min(100, int(patience / 20 / max(found, 1e-7))))
        return found


def _repeat(function: Callable[[], Any], number: int) -> None:
    for _ in range(number):
        function()


def in_turn(operations: Sequence[Operation], clock: Clock, missing: set[Operation]) -> dict[Operation, float]:
    """The least seconds of each, run for real in this order, round by round; without those that cannot be run.

    missing: gets those that the device has no kernel for.
    """
    functions: dict[Operation, Callable[[], Any]] = {}
    least: dict[Operation, float] = {}
    for operation in operations:
        call = operation.call
        assert call is not None, f"{operation.name} cannot be run"
        try:
            functions[operation] = call(clock.device)
            functions[operation]()
        except Exception as error:  # values that it cannot take, for one
            functions.pop(operation, None)
            if isinstance(error, NotImplementedError):
                missing.add(operation)
    others = torch.zeros(CACHES // 4, device=clock.device)
    for _ in range(ROUNDS):
        others.add_(1)
        for operation, function in functions.items():
            least[operation] = min(least.get(operation, float("inf")), clock.once(function))
    return least


def call_times(clock: Clock) -> list[tuple[int, float]]:
    """`(bytes, seconds)`: from one operation of a small network to the next, forward and backward, by the bytes that
    the former moves. Views are counted as operations.
    """
    width = 8
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(10)]
    model = nn.Sequential(*layers).to(clock.device)
    inputs = torch.randn(4, width, device=clock.device)

    def step() -> None:
        model(inputs).sum().backward()

    with Dispatched() as counted:
        step()
    one = torch.ones(8, device=clock.device)
    with torch.no_grad():
        each = clock.best(functools.partial(torch.add, one, one)) - clock.best(_nothing)
    operations = counted.operations
    hot = max(clock.best(step) - operations * each, 0.0) / counted.all
    between = [min(_between_operations(clock, step, size) for _ in range(3)) for size in _EVICTED]
    return [
        (size, hot + max(seconds - between[0], 0.0) / operations)
        for size, seconds in zip(_EVICTED, between, strict=True)
    ]


def _nothing() -> None:
    pass


def _between_operations(clock: Clock, step: Callable[[], None], size: int) -> float:
    """Seconds of a step but for its operations, each of which is followed by others that move so many bytes."""
    with _Evicting(clock, size) as mode:
        started = clock.now()
        step()
        return clock.now() - started - mode.spent


class Dispatched(DispatchMode):
    """Counts operations, views, and those of the operations that are in checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.views = self.in_blocks = 0

    @property
    def all(self) -> int:
        """Operations and views."""
        return self.operations + self.views

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view
        self.views += func.is_view
        self.in_blocks += not func.is_view and CheckpointCounters.inside > 0
        return func(*args, **(kwargs or {}))


class _Evicting(DispatchMode):
    """Moves so many bytes after each operation. `spent`: seconds of the operations and of that."""

    def __init__(self, clock: Clock, size: int):
        super().__init__()
        self._clock, self._other, self.spent = clock, torch.zeros(size // 8, device=clock.device), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = self._clock.now()
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._other.add_(1)
            self._clock.wait()
        self.spent += self._clock.now() - started
        return result
