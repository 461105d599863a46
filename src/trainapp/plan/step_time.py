"""How long a traced step takes on the device at hand, for comparing configurations: an estimate, not a measurement.

Each operation is assumed to take as long as it does alone: it is run for real, on tensors of these shapes, if small
enough. For others, the larger of compute time and memory time counts, at rates measured here: the roofline of Williams
et al. 2009, times what small operations of the same name take beyond it. Every operation is also called, from Python.
Left out: fetching batches, metrics, evaluation, writing files, traffic between ranks.
"""

import functools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.plan.operation import ATTENTION, CONVOLUTION, FUNCTION, MATMUL, Operation, operation_of
from trainapp.torch_private import DispatchMode, outside_dispatch_modes
from trainapp.train.phase import Phase

LARGEST = 2**26  # bytes that an operation may move to be run for real
PATIENCE = 5.0  # seconds for the operations of the first steps that are run for real
FOR_EACH = 1.0  # seconds at least for those of each further step
_PER_MICRO_BATCH = frozenset({Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.BACKWARD_AFTER_UPDATES})
_PER_STEP = frozenset(
    {Phase.GRADIENTS, Phase.UNSCALE, Phase.CLIP, Phase.UPDATE_IN_BACKWARD, Phase.COMMIT, Phase.COMMITTED}
)


@dataclass
class Work:
    """The operations of a step. The trace has taken `traced` of its `micro_batches`, with this share of its samples."""

    per_micro_batch: "Counter[Operation]" = field(default_factory=Counter)
    per_step: "Counter[Operation]" = field(default_factory=Counter)
    share: float = 1.0
    traced: int = 1
    micro_batches: int = 1

    def seconds(self, speeds: "Speeds", micro_batches: int | None = None) -> float:
        """Of the whole step. micro_batches: as if there were so many, of larger or smaller size."""
        speeds.measure(self.per_micro_batch + self.per_step)
        busy = sum(count * speeds.busy(operation) for operation, count in self.per_micro_batch.items())
        calls = sum(self.per_micro_batch.values())
        once = sum(count * (speeds.busy(operation) + speeds.call) for operation, count in self.per_step.items())
        return busy / self.share + calls * speeds.call * (micro_batches or self.micro_batches) / self.traced + once


class WorkCounter(DispatchMode):
    """While active, adds the operations of a step to `work`. phase: where the step is; only some phases count."""

    def __init__(self, phase: Callable[[], Phase | None]):
        super().__init__()
        self._phase = phase
        self.work = Work()

    def afresh(self) -> "WorkCounter":
        """Itself, with nothing counted yet."""
        self.work = Work()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        phase = self._phase()
        if func.is_view or func.namespace == "prim":  # asked of tensors without data only, such as for their device
            return result
        if phase in _PER_MICRO_BATCH:
            self.work.per_micro_batch[operation_of(func, args, kwargs or {}, result)] += 1
        elif phase in _PER_STEP:
            self.work.per_step[operation_of(func, args, kwargs or {}, result)] += 1
        return result


class Speeds:
    """What the device can do; each rate is measured when it is first asked for. Use from one thread, in no mode.

    Attributes: `call`, seconds from one small operation of a training step to the next, Python and autograd included.
    """

    def __init__(self, device: torch.device):
        self.device = device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter  # the former is blind to other processes
        self._left = PATIENCE
        self._seconds: dict[Operation, float] = {}
        self._measured: list[tuple[Operation, float]] = []  # run for real
        with outside_dispatch_modes():
            one = torch.ones(8, device=device)
            self.call = max(self._call() - self._best(lambda: one + one), 0.0)
        self._of_arithmetic = functools.cache(self._arithmetic)
        self._of_traffic = functools.cache(self._traffic)

    def measure(self, operations: "Counter[Operation]") -> None:
        """Run them for real while patience lasts, first those that are expected to take the most of the step."""
        self._left = max(self._left, FOR_EACH)
        for operation in sorted(operations, key=lambda one: -operations[one] * self.roofline(one)):
            self.busy(operation)

    def busy(self, operation: Operation) -> float:
        """Seconds of the operation itself, the same whenever it is asked for."""
        seconds = self._seconds.get(operation)
        if seconds is None:
            seconds = self._real(operation) if operation.moved <= LARGEST and self._left > 0 else None
            if seconds is None:
                seconds = self.roofline(operation) * self._beyond_roofline(operation)
            else:
                self._measured.append((operation, seconds))
            self._seconds[operation] = seconds
        return seconds

    def _beyond_roofline(self, operation: Operation) -> float:
        """How many times longer than the least the largest of this name takes; without a large one, all of them."""
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
        moving = _between(self._of_traffic(operation.allocates), operation.moved) if operation.moved else 0.0
        if not operation.work:
            return moving
        fixed, each = self._of_arithmetic(operation.kind, operation.dtype)
        return max(fixed + each * operation.work, moving)

    def _real(self, operation: Operation) -> float | None:
        """Seconds of the operation, run for real; None where that fails: values that it cannot take."""
        started = self._clock()
        try:
            if operation.call is None:
                return None
            with outside_dispatch_modes(), torch.no_grad():
                return self._best(operation.call(self.device), patience=0.006)
        except Exception:
            return None
        finally:
            self._left -= self._clock() - started

    def _call(self) -> float:
        """Of a small network, forward and backward, whose operations are counted in the same way."""
        width = 8
        layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(10)]
        model = nn.Sequential(*layers).to(self.device)
        inputs = torch.randn(4, width, device=self.device)

        def step() -> None:
            model(inputs).sum().backward()

        counter = WorkCounter(lambda: Phase.FORWARD)
        with counter:
            step()
        return self._best(step) / sum(counter.work.per_micro_batch.values())

    def _arithmetic(self, kind: str, dtype: torch.dtype) -> tuple[float, float]:
        """Seconds per call and per unit of work, from a small and a large operation."""
        points: list[tuple[int, float]] = []
        with outside_dispatch_modes(), torch.no_grad():
            for size in (32, 64, 128, 256, 512):
                function, work = _PROBES[kind](size, dtype, self.device)
                points.append((work, self._best(function)))
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
                points.append((3 * x.nbytes, self._best(function)))
        return points

    def _best(self, function: Callable[[], Any], patience: float = 0.03) -> float:
        """Seconds per call, of the fastest of some rounds: what disturbs the machine only adds.

        patience: seconds for all rounds; at least two count, or one that alone takes longer.
        """
        function()
        found, number, spent = float("inf"), 1, 0.0
        for turn in range(20):
            self._wait()
            started = self._clock()
            for _ in range(number):
                function()
            self._wait()
            seconds = self._clock() - started
            found, spent = min(found, seconds / number), spent + seconds
            if spent > patience and (turn or seconds > 5 * patience):
                break
            number = max(1, min(100, int(patience / 20 / max(found, 1e-7))))
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _between(points: list[tuple[int, float]], moved: int) -> float:
    """Seconds for so many bytes: the rates between two measured sizes, interpolated; outside, that of the nearest."""
    place = bisect_left(points, (moved, 0.0))
    if place == 0 or place == len(points):
        size, seconds = points[min(place, len(points) - 1)]
        return seconds * moved / size
    (low, fast), (high, slow) = points[place - 1], points[place]
    return fast + (slow - fast) * (moved - low) / (high - low)


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
