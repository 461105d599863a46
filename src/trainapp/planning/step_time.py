"""How long a traced step takes on the device at hand, for comparing configurations: an estimate, not a measurement.

Its operations are run for real, on tensors of these shapes, if small enough: each after the others, as in the step. For
others, the larger of compute time and memory time counts, at rates measured here: the roofline of Williams et al. 2009,
times that by which measured operations exceed theirs. From one operation to the next, Python and autograd take
the longer the more the former has driven out of the caches.
Left out: fetching batches, metrics, evaluation, writing files, traffic between ranks.
"""

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from trainapp.memory.host_guard import available_bytes
from trainapp.planning.checkpointing_times import Delay, delay
from trainapp.planning.operation import ATTENTION, CONVOLUTION, FUNCTION, MATMUL, Counts, Operation
from trainapp.planning.operation_times import ROUNDS, Clock, call_times, in_turn
from trainapp.torch_private import outside_dispatch_modes

LARGEST = 2**28  # bytes that operations may hold to be run for real in turn
SHARE_OF_MEMORY = 0.1  # of the available memory: lowers LARGEST on a small machine
BUILDING = 1e-9  # seconds per byte of an operation's arguments
PATIENCE = 5.0  # seconds for the operations of the first steps that are run for real
FOR_EACH = 2.0  # seconds at least for those of each further step


class Speeds:
    """What the device can do; each rate is measured when it is first asked for. Use from one thread.

    view: seconds from one small operation of a training step to the next, Python and autograd included. missing: the
    operations so far that the device has no kernel for, which those for tensors without data do not tell.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.clock = Clock(device)
        self._left = PATIENCE
        self.missing: set[Operation] = set()
        self._seconds: dict[Operation, float] = {}
        self._measured: list[tuple[Operation, float]] = []  # run for real
        self._largest = min(LARGEST, int(SHARE_OF_MEMORY * available_bytes()))
        with outside_dispatch_modes():
            self._calls = call_times(self.clock)
        self.view = self._calls[0][1]
        self._of_arithmetic = functools.cache(self._arithmetic)
        self._of_traffic = functools.cache(self._traffic)
        self._of_checkpointing = functools.cache(self._checkpointing)

    def measure(self, operations: Counts) -> None:
        """Run them for real while patience lasts: those that are expected to take the most of the step."""
        self._left = max(self._left, FOR_EACH)
        new = [operation for operation in operations if operation not in self._seconds]
        expected = {operation: self.roofline(operation) for operation in new}
        started, left, chosen = self.clock.now(), self._left, set[Operation]()
        for operation in sorted(new, key=lambda one: -operations[one] * expected[one]):
            needed = 2 * ROUNDS * expected[operation] + BUILDING * operation.held
            if operation.call is not None and operation.held <= self._largest and left > needed:
                chosen.add(operation)
                left -= needed
        found: dict[Operation, float] = {}
        with outside_dispatch_modes(), torch.no_grad():
            for group in _groups([operation for operation in new if operation in chosen], self._largest):
                found |= in_turn(group, self.clock, self.missing)
        self._left -= self.clock.now() - started
        self._measured += found.items()
        for operation in new:
            known = found.get(operation)
            self._seconds[operation] = self._estimate(operation) if known is None else known

    def busy(self, operation: Operation) -> float:
        """Seconds of the operation itself, the same whenever it is asked for."""
        if operation not in self._seconds:
            self.measure(Counter([operation]))
        return self._seconds[operation]

    def call(self, operation: Operation) -> float:
        """Seconds from its end to the next operation: what it moves drives Python and autograd out of the caches."""
        return _between(self._calls, operation.moved)

    def delay(self, moved: int, selective: bool) -> Delay:
        """What checkpointing adds to a block, and to each of its operations, after one that moves so many bytes."""
        out_of_caches = _between(self._calls, moved) / self.view
        block, each = self._of_checkpointing(selective)
        return Delay(block * out_of_caches, each * out_of_caches)

    def step(self, busy: float, copying: float, between: float) -> float:
        """Seconds of a step: one after the other."""
        return busy + copying + between

    def _checkpointing(self, selective: bool) -> Delay:
        with outside_dispatch_modes():
            return delay(self.clock, selective)

    def _estimate(self, operation: Operation) -> float:
        return self.roofline(operation) * self._beyond_roofline(operation)

    def _beyond_roofline(self, operation: Operation) -> float:
        """By how much the largest measured operation of this name and dtype exceeds its roofline; if none is large,
        all measured operations together.
        """
        similar = [
            (other, seconds)
            for other, seconds in self._measured
            if (other.name, other.dtype) == (operation.name, operation.dtype) and 64 * other.moved > operation.moved
        ]
        counted = [max(similar, key=lambda measured: measured[0].moved)] if similar else self._measured
        least = sum(self.roofline(other) for other, _ in counted)
        return max(1.0, sum(seconds for _, seconds in counted) / least) if least else 1.0

    def roofline(self, operation: Operation) -> float:
        """The least seconds that the operation can take."""
        moving = _of_bytes(self._of_traffic(operation.allocates), operation.moved) if operation.moved else 0.0
        if not operation.work:
            return moving
        fixed, each = self._of_arithmetic(operation.kind, operation.dtype)
        return max(fixed + each * operation.work, moving)

    def _arithmetic(self, kind: str, dtype: torch.dtype) -> tuple[float, float]:
        """Seconds per call and per unit of work, from a small and a large operation."""
        points: list[tuple[int, float]] = []
        with outside_dispatch_modes(), torch.no_grad():
            for size in (32, 64, 128, 256, 512):
                function, work = _PROBES[kind](size, dtype, self.device)
                points.append((work, self.clock.best(function)))
                if points[-1][1] > 0.02:
                    break
        if len(points) < 2:
            return 0.0, points[0][1] / points[0][0]
        (small, fast), (large, slow) = points[0], points[-1]
        each = max(slow - fast, 0.1 * slow) / (large - small)
        return max(fast - each * small, 0.0), each

    def _traffic(self, allocates: bool) -> list[tuple[int, float]]:
        """`(bytes moved, seconds)`: by size, since caches are faster, and new pages of memory slower."""
        points = []
        with outside_dispatch_modes(), torch.no_grad():
            for power in range(12, 27, 2):
                x = torch.ones(2**power // 4 + 2**18 * (power == 26), device=self.device)
                y = torch.ones_like(x)
                function = functools.partial(torch.add, x, y) if allocates else functools.partial(x.add_, y)
                points.append((3 * x.nbytes, self.clock.best(function)))
        return points


def _groups(operations: list[Operation], most: int) -> Iterator[list[Operation]]:
    """The operations in their order, cut where those of a group hold more than `most` bytes."""
    group: list[Operation] = []
    held = 0
    for operation in operations:
        if group and held + operation.held > most:
            yield group
            group, held = [], 0
        group.append(operation)
        held += operation.held
    if group:
        yield group


def _between(points: list[tuple[int, float]], moved: int) -> float:
    """Seconds after so many bytes, between two measured sizes; outside, those of the nearest."""
    place = bisect_left(points, (moved, 0.0))
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (low, fast), (high, slow) = points[place - 1], points[place]
    return fast + (slow - fast) * (moved - low) / (high - low)


def _of_bytes(points: list[tuple[int, float]], moved: int) -> float:
    """Seconds for so many bytes: as `_between`; outside, at the rate of the nearest."""
    nearest = min(max(moved, points[0][0]), points[-1][0])
    return _between(points, nearest) * moved / nearest


def _matmul(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    a = torch.ones(size, size, device=device).to(dtype)
    return functools.partial(torch.mm, a, a), 2 * size**3


def _convolution(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    x = torch.ones(4, size // 4, 16, 16, device=device).to(dtype)
    weight = torch.ones(size // 4, size // 4, 3, 3, device=device).to(dtype)
    return functools.partial(torch.conv2d, x, weight, padding=1), 2 * x.numel() * weight[0].numel()


def _attention(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    q = torch.ones(2, 4, size, 32, device=device).to(dtype)
    return functools.partial(nn.functional.scaled_dot_product_attention, q, q, q), 4 * q.numel() * size


def _function(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    x = torch.ones(size, size, device=device).to(dtype)
    return functools.partial(nn.functional.silu, x), x.numel()


_PROBES = {MATMUL: _matmul, CONVOLUTION: _convolution, ATTENTION: _attention, FUNCTION: _function}
