"""Real steps at small sizes, and the line through their peaks: for models that cannot be traced, and for times."""

import bisect
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator

import torch

from trainapp.assembly.engine import assemble
from trainapp.assembly.resolved_targets import ResolvedTargets
from trainapp.assembly.resources import open_resources
from trainapp.config.schema import Config, Memory
from trainapp.errors import UserError
from trainapp.memory.build import build_memory
from trainapp.memory.host import available_bytes, guarded, total_bytes
from trainapp.planning.absent_gpu import AbsentGpu
from trainapp.planning.recorder import Breakdown, Recorder
from trainapp.planning.simulated_ranks import simulated
from trainapp.planning.work import Work, largest_share, planned_config

SIZES = (2, 8)  # two points determine the line
STEPS = 2  # at each size
MEMORY_SHARE = 0.25  # largest fraction of the host's available memory to use
LONGEST = 5.0  # seconds; a size whose step takes longer is extrapolated instead of run
TIMED = 3  # number of timed steps
MOST_MICRO_BATCHES = 8  # in a timed step


class MeasuredEstimator:
    """The estimator that runs small real steps, on one rank whose peers exchange nothing.

    Raises the model's errors; MemoryLimitExceeded if two sizes do not fit into MEMORY_SHARE.

    Args:
        targets: the classes and data sets of the configuration.
        world_size: number of ranks to plan for.
        device: on which the steps run.
        instead_of: an absent GPU that steps on the CPU stand in for.
    """

    method = "measured"

    def __init__(
        self, targets: ResolvedTargets, world_size: int, device: torch.device, instead_of: AbsentGpu | None = None
    ):
        self.targets = targets
        self.world_size = world_size
        self.device = device
        self.margin = 0.1 if instead_of is None else 0.3  # relative error of a peak
        self.spare = self.margin  # the fraction of a peak that must stay free for it to fit
        self._instead_of = instead_of
        # By configuration and whether the step accumulates; then by size.
        self._measured: dict[tuple[str, bool], dict[int, Breakdown]] = {}

    def limit(self, config: Config) -> int:
        """Return the bytes that a run may use."""
        if self._instead_of is not None:
            return self._instead_of.limit(config)
        return build_memory(config.memory, self.device).enforced

    def peak(self, config: Config, size: int) -> Breakdown:
        """Return the peak, as `TracedEstimator.peak`: measured if cheap, otherwise on the line through two sizes."""
        # The line is the same for all sizes that accumulate; the whole share in one micro-batch has another.
        accumulates = size < largest_share(config, self.targets, self.world_size)
        by_size = self._measured.setdefault((repr(config), accumulates), {})
        for small in SIZES:
            if small < size and small not in by_size:
                by_size[small] = self._run(config, small, accumulates)
        if size in by_size:
            return by_size[size]

        # Larger sizes run only if that is cheap. One that fails nevertheless is as expensive as the line tells.
        estimate = _on_the_line(size, by_size)
        has_line = len(by_size) > 1
        if has_line and not self._is_cheap(estimate):
            return estimate
        try:
            by_size[size] = self._run(config, size, accumulates)
        except UserError:
            raise
        except Exception:
            if len(by_size) < len(SIZES):
                raise
            return estimate
        return by_size[size]

    def _is_cheap(self, estimate: Breakdown) -> bool:
        """Return whether steps that need as much as this may run."""
        if self.device.type == "cpu" and estimate.total > MEMORY_SHARE * available_bytes():
            return False
        return estimate.seconds <= LONGEST

    def _run(self, config: Config, size: int, accumulates: bool) -> Breakdown:
        """Run STEPS steps of a size.

        Args:
            config: the configuration.
            size: of a micro-batch.
            accumulates: measure a step of two micro-batches, the second with gradients already in memory.
        """
        # The host keeps most of its memory, whether or not storages can be counted.
        most = int(MEMORY_SHARE * available_bytes())
        guard = Memory(guard=True, guard_reserve=max(0, available_bytes() - most))

        micro_batches = 2 if accumulates else 1
        with guarded(guard, total_bytes()), self._open_work(config, size, micro_batches, most) as work:
            started = time.monotonic()
            if isinstance(work.memory, Recorder):
                breakdown = work.peak(work.memory, steps=STEPS)
            else:
                breakdown = _peak_by_counters(work)
            step_seconds = (time.monotonic() - started) / STEPS
            return dataclasses.replace(breakdown, seconds=step_seconds)

    def seconds(self, config: Config, size: int) -> float:
        """Return the seconds of a whole step of the configuration with micro-batches of `size`: the median of TIMED
        after a first one.

        Runs at most MOST_MICRO_BATCHES of the step, and extrapolates.
        """
        share = largest_share(config, self.targets, self.world_size)
        micro_batches = max(1, round(share / size))
        micro_batches = min(micro_batches, MOST_MICRO_BATCHES)
        with self._open_work(config, size, micro_batches) as work:
            step_seconds = []
            for _ in range(1 + TIMED):
                work.memory.synchronize()  # the device must be idle when a step starts, and have finished it
                started = time.monotonic()
                work.train_step()
                work.memory.synchronize()
                step_seconds.append(time.monotonic() - started)

        # Without the first step, which also warms up; extrapolated to all samples of the step.
        timed_samples = micro_batches * size
        return statistics.median(step_seconds[1:]) * share / timed_samples

    @contextlib.contextmanager
    def _open_work(self, config: Config, size: int, micro_batches: int, most: int | None = None) -> Iterator[Work]:
        """Yield the engine of the configuration, really built.

        Args:
            config: the configuration.
            size: samples per micro-batch.
            micro_batches: per step.
            most: limit in bytes; if given, CPU storages are counted.
        """
        samples = micro_batches * size * self.world_size
        planned = planned_config(config, size, samples)
        with simulated(0, self.world_size, self.device) as ranks:
            resources = open_resources(planned, ranks, self.targets)
            if most is not None and resources.device.type == "cpu":
                resources.memory = Recorder(resources.device, most)
            with contextlib.closing(resources):
                engine = assemble(planned, resources, ranks).engine
                yield Work(planned, engine, resources, size)


def _peak_by_counters(work: Work) -> Breakdown:
    """Return the breakdown of STEPS steps by the device's own counters, without phases: reserved bytes, if known."""
    work.memory.window()
    for _ in range(STEPS):
        work.train_step()
    work.memory.synchronize()
    peaks = work.memory.window()
    allocated = int(peaks["memory/peak"])
    total = max(allocated, int(peaks["memory/peak_reserved"]))
    categories = {"allocated": allocated}
    if total > allocated:
        categories["cache"] = total - allocated
    breakdown = Breakdown(total, "training", phases={"training": total}, categories=categories)
    return work.with_model_facts(breakdown)


def _on_the_line(size: int, by_size: dict[int, Breakdown]) -> Breakdown:
    """Return the breakdown at a size, by phase, on the line through the two neighbouring or nearest measured sizes.
    With only one, that one; empty without any.
    """
    sizes = sorted(by_size)
    if not sizes:
        return Breakdown()
    if len(sizes) == 1:
        return by_size[sizes[0]]

    # The first measured size above and the one below it; outside of all, the two nearest.
    above = min(max(1, bisect.bisect_right(sizes, size)), len(sizes) - 1)
    small = sizes[above - 1]
    large = sizes[above]
    at_small = by_size[small]
    at_large = by_size[large]

    def bytes_at_size(small_bytes: int, large_bytes: int) -> int:
        growth = (size - large) * (large_bytes - small_bytes) / (large - small)
        return max(0, large_bytes + round(growth))

    # Each phase has a line of its own. Their highest point is the peak.
    phases = {}
    for name, large_bytes in at_large.phases.items():
        phases[name] = bytes_at_size(at_small.phases.get(name, large_bytes), large_bytes)
    phase = max(phases, key=lambda name: phases[name])

    categories = {}
    if at_small.phase == at_large.phase == phase:  # otherwise they are of other moments of the step
        for name in dict.fromkeys([*at_large.categories, *at_small.categories]):
            categories[name] = bytes_at_size(at_small.categories.get(name, 0), at_large.categories.get(name, 0))
    return dataclasses.replace(
        at_large,
        total=phases[phase],
        phase=phase,
        module="",
        phases=phases,
        categories=categories,
        events=[],
        seconds=at_large.seconds * size / large,
    )
