"""Real steps at small sizes, and the line through their peaks: for models that cannot be traced, and for times."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from trainapp.assembly.engine import assemble
from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import open_resources
from trainapp.config.schema import Config, Memory
from trainapp.data.stream_reader import at_most
from trainapp.errors import UserError
from trainapp.memory import device as device_memory
from trainapp.memory.host import available_bytes, guarded, total_bytes
from trainapp.planning.absent_gpu import AbsentGpu
from trainapp.planning.recorder import Breakdown, Recorder
from trainapp.planning.simulated_ranks import simulated
from trainapp.planning.work import Work, planned_config

SIZES = (2, 8)  # two points determine the line
STEPS = 2  # at each size
MEMORY_SHARE = 0.25  # largest fraction of the host's available memory to use
LONGEST = 5.0  # seconds; a size whose step takes longer is extrapolated instead of run
TIMED = 3  # number of timed steps
MOST_MICRO_BATCHES = 8  # in a timed step


class MeasuredEstimator:
    """The estimator that runs small real steps, on one rank whose peers exchange nothing.

    instead_of: an absent GPU that steps on the CPU stand in for.
    Raises the model's errors; MemoryLimitExceeded if two sizes do not fit into MEMORY_SHARE.
    """

    method = "measured"

    def __init__(
        self, targets: ResolvedTargets, world_size: int, device: torch.device, instead_of: AbsentGpu | None = None
    ):
        self.targets, self.world_size, self.device, self._instead_of = targets, world_size, device, instead_of
        self.margin = self.spare = 0.1 if instead_of is None else 0.3
        self._known: dict[tuple[Any, ...], dict[int, Breakdown]] = {}

    def limit(self, config: Config) -> int:
        """The bytes that a run may use."""
        if self._instead_of is not None:
            return self._instead_of.limit(config)
        return device_memory.build(config.memory, self.device).enforced

    def peak(self, config: Config, size: int) -> Breakdown:
        """As `TracedEstimator.peak`. Measured if that is cheap, otherwise on the line through two sizes."""
        accumulates = size < -(-at_most(config.batch.global_size, self.targets.train_data) // self.world_size)
        known = self._known.setdefault((repr(config), accumulates), {})
        for small in (small for small in SIZES if small < size):
            if small not in known:
                known[small] = self._run(config, small, accumulates)
        line = known.get(size) or _at(size, known)
        has_room = self.device.type != "cpu" or line.total <= MEMORY_SHARE * available_bytes()
        if size in known or (len(known) > 1 and not (has_room and line.seconds <= LONGEST)):
            return line
        try:
            known[size] = self._run(config, size, accumulates)
        except UserError:
            raise
        except Exception:
            if len(known) < len(SIZES):
                raise
            return line
        return known[size]

    def _run(self, config: Config, size: int, accumulates: bool) -> Breakdown:
        """accumulates: measure a step of two micro-batches, the second with gradients already in memory."""
        most = int(MEMORY_SHARE * available_bytes())
        left = Memory(guard=True, guard_reserve=max(0, available_bytes() - most))
        with guarded(left, total_bytes()), self._running(config, size, 1 + accumulates, most) as work:
            started = time.monotonic()
            if isinstance(work.memory, Recorder):
                found = work.peak(work.memory, steps=STEPS)
            else:
                found = _by_counters(work)
            return dataclasses.replace(found, seconds=(time.monotonic() - started) / STEPS)

    def seconds(self, config: Config, size: int) -> float:
        """Seconds of a whole step of the configuration with micro-batches of `size`: the median of TIMED after a first
        one.

        Runs at most MOST_MICRO_BATCHES of the step, and extrapolates.
        """
        share = -(-at_most(config.batch.global_size, self.targets.train_data) // self.world_size)
        parts = min(MOST_MICRO_BATCHES, max(1, round(share / size)))
        with self._running(config, size, parts) as work:
            taken = []
            for _ in range(1 + TIMED):
                work.memory.synchronize()
                started = time.monotonic()
                work.train_step()
                work.memory.synchronize()
                taken.append(time.monotonic() - started)
        return statistics.median(taken[1:]) * share / (parts * size)

    @contextlib.contextmanager
    def _running(self, config: Config, size: int, micro_batches: int, most: int | None = None) -> Iterator[Work]:
        """The engine of the configuration, really built, with these samples per micro-batch and micro-batches per step.
        most: limit in bytes; if given, CPU storages are counted.
        """
        planned = planned_config(config, size, micro_batches * size * self.world_size)
        with simulated(0, self.world_size, self.device) as ranks:
            resources = open_resources(planned, ranks, self.targets)
            if most is not None and resources.device.type == "cpu":
                resources.memory = Recorder(resources.device, most)
            with contextlib.closing(resources):
                yield Work(planned, assemble(planned, resources, ranks), resources, size)


def _by_counters(work: Work) -> Breakdown:
    """The breakdown by the device's own counters, without phases: reserved bytes, if known."""
    work.memory.window()
    for _ in range(STEPS):
        work.train_step()
    work.memory.synchronize()
    peaks = work.memory.window()
    allocated, reserved = int(peaks["memory/peak"]), int(peaks["memory/peak_reserved"])
    total = max(allocated, reserved)
    categories = {"allocated": allocated} | ({"cache": total - allocated} if total > allocated else {})
    return work.described(Breakdown(total, "training", phases={"training": total}, categories=categories))


def _at(size: int, known: dict[int, Breakdown]) -> Breakdown:
    """The breakdown at a size, by phase, on the line through the two neighbouring or nearest known sizes."""
    points = sorted(known.items())
    if len(points) < 2:
        return points[0][1] if points else Breakdown()
    above = next((number for number, (other, _) in enumerate(points) if other > size), len(points) - 1)
    (a, low), (b, high) = points[max(1, above) - 1], points[max(1, above)]

    def line(from_a: int, from_b: int) -> int:
        return max(0, from_b + round((size - b) * (from_b - from_a) / (b - a)))

    phases = {name: line(low.phases.get(name, value), value) for name, value in high.phases.items()}
    phase = max(phases, key=lambda name: phases[name])
    categories: dict[str, int] = {}
    if low.phase == high.phase == phase:
        names = dict.fromkeys([*high.categories, *low.categories])
        categories = {name: line(low.categories.get(name, 0), high.categories.get(name, 0)) for name in names}
    found = dataclasses.replace(high, total=phases[phase], phase=phase, module="", phases=phases, events=[])
    return dataclasses.replace(found, categories=categories, seconds=high.seconds * size / b)
