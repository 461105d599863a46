"""What fits of a configuration: its peak at a size, the largest micro-batch, and the cheapest modes of its blocks."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, get_args

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.losses.contrastive import require_uncut
from trainapp.losses.losses import needs_whole_batch
from trainapp.memory.live_tensors import MemoryLimitExceeded
from trainapp.planning.measured import MeasuredEstimator
from trainapp.planning.process import MemoryPlan, has_open_modes
from trainapp.planning.recorder import Breakdown
from trainapp.planning.traced import TracedEstimator
from trainapp.planning.work import largest_share, samples_per_step
from trainapp.sizes.record import configured_size
from trainapp.sizes.search import PeakSample, SizeSearch
from trainapp.techniques.checkpointing import Mode, choose_modes

Estimator = TracedEstimator | MeasuredEstimator  # estimates the memory that a configuration needs
MODES: tuple[Mode, ...] = get_args(Mode)


class Planner:
    """Estimates one configuration at the sizes that its plan needs, each at most once.

    Attributes:
        limit: bytes that a run may use.
        allowed_peak: in bytes: the limit without the estimator's margin.
        share: samples of a step on the rank with the most.
        is_unsplit: whether a batch is never split, so that only its own size is possible.
        peak: returns the breakdown at a micro-batch size.
        full_peak: returns it from all of the model's blocks: slower, and with a module and events for a plot.
    """

    def __init__(self, config: Config, estimator: Estimator):
        self.config = config
        self.estimator = estimator
        self.limit = estimator.limit(config)
        self.allowed_peak = int(self.limit / (1 + estimator.spare))
        self.share = largest_share(config, estimator.targets, estimator.world_size)
        self.is_unsplit = needs_whole_batch(estimator.targets.task)
        estimate_peak = functools.partial(estimator.peak, config)
        self.peak: Callable[[int], Breakdown] = functools.cache(estimate_peak)
        self.full_peak: Callable[[int], Breakdown] = functools.cache(self._full_peak)

    def _full_peak(self, size: int) -> Breakdown:
        breakdown = self.peak(size)
        if breakdown.leaves_out_blocks and isinstance(self.estimator, TracedEstimator):
            return self.estimator.full_peak(self.config, size)
        return breakdown

    def fits(self, size: int) -> bool:
        """Return whether micro-batches of this size stay within the limit, including the margin."""
        return self.peak(size).total <= self.allowed_peak

    @functools.cached_property
    def smallest(self) -> int:
        """The fewest samples on which the model can train, at most a rank's share."""
        if self.is_unsplit:
            return self.share
        return min(self.peak(self.share).smallest, self.share)

    @property
    def configured(self) -> int | None:
        """The configured micro-batch size; of a schedule, the largest. None if it is to be found."""
        if self.config.batch.micro_schedule is None:
            return configured_size(self.config, self.share)
        sizes: list[int] = []
        for schedule in self.config.batch.schedules.values():
            for scheduled in schedule.values():
                if isinstance(scheduled, dict):  # by bucket
                    sizes.extend(scheduled.values())
                else:
                    sizes.append(scheduled)
        return min(self.share, max(sizes))

    @functools.cached_property
    def largest(self) -> int:
        """The largest micro-batch that fits, 0 if none does."""
        return self._largest_by(self.peak)

    @functools.cached_property
    def confirmed_largest(self) -> int:
        """`largest`, whose peak was traced with all blocks."""
        size = self.largest
        if size and self.full_peak(size).total > self.allowed_peak:  # by the little that few blocks differ
            return self._largest_by(self.full_peak)
        return size

    def _largest_by(self, peak: Callable[[int], Breakdown]) -> int:
        return largest_size(lambda size: peak(size).total, self.allowed_peak, self.share, self.smallest)

    def plan(self) -> tuple[MemoryPlan, Breakdown]:
        """Return the plan at the configured size, otherwise the largest that fits, otherwise the smallest."""
        config = self.config
        world_size = self.estimator.world_size
        if self.is_unsplit:
            require_uncut(config, world_size, samples_per_step(config, self.estimator.targets))
        size = self.configured or self.confirmed_largest or self.smallest
        breakdown = self.full_peak(size)

        # Without sharding, each rank has a whole replica.
        replicas = world_size
        if config.parallel.strategy == "fsdp":
            replicas = config.parallel.fsdp.replicas
        ranks = {"world": world_size, "strategy": config.parallel.strategy, "replicas": replicas}

        plan = MemoryPlan(
            self.estimator.method,
            self.estimator.margin,
            notes=list(breakdown.notes),
            peak_bytes=breakdown.total,
            phase=breakdown.phase,
            module=breakdown.module,
            phases=breakdown.phases,
            categories=breakdown.categories,
            ranks=ranks,
            micro_size=size,
            largest_micro_size=self.confirmed_largest,
            limit_bytes=self.limit,
            modes=config.activation_checkpointing.modes,
        )
        return plan, breakdown


def largest_size(peak: Callable[[int], int], allowed_peak: int, top: int, smallest: int) -> int:
    """Return the largest size whose peak is at most the allowed one, by the search of a run, which ends within 5% of it
    if the peak has no jumps; 0 if there is none.

    Args:
        peak: returns the peak of a size, in bytes.
        allowed_peak: in bytes.
        top: the largest size to try; it is tried first.
        smallest: the smallest size to try.
    """
    if top < 1 or peak(top) <= allowed_peak:
        return top

    # As in a run, but from below: the smallest size first, and `top` is known to fail.
    search = SizeSearch(smallest, clean_steps=1, smallest=smallest, smallest_excluded=top, search_has_ended=False)
    while smallest < top:
        try:
            peak_bytes = peak(search.size)
        except (UserError, MemoryError, MemoryLimitExceeded):
            raise
        except Exception:
            if search.size > 1:
                raise
            search.size = search.smallest = 2  # some models do not accept single samples
            continue
        if peak_bytes <= allowed_peak:
            next_size = search.record_success(search.size, PeakSample(peak_bytes, allowed_peak))
            if next_size is None:  # no larger one can fit
                return search.size
        else:
            can_fit = search.record_failure(search.size)
            if not can_fit:
                break
    return 0


class ModeChoice(NamedTuple):
    """A configuration with a mode for each block, and what it was chosen from.

    Attributes:
        config: the configuration.
        planner: of the configuration with open modes.
        size: of the micro-batch for which the modes were chosen.
        peaks: with all blocks in one mode.
    """

    config: Config
    planner: Planner
    size: int
    peaks: dict[Mode, Breakdown]

    def lowest_peak(self) -> Breakdown:
        """Return the lowest peak of any mode: that of the smallest micro-batch if the chosen size does not fit."""
        lowest = _lowest(self.peaks)
        smallest = self.planner.smallest
        if lowest.total > self.planner.allowed_peak and smallest < self.size:
            lowest = _lowest(_peaks_by_mode(self.planner, smallest))
        return lowest


def with_cheapest_modes(config: Config, estimator: Estimator) -> Config:
    """Return the configuration with a mode for each block, if `activation_checkpointing=auto` leaves them open."""
    return choose_cheapest_modes(config, estimator).config if has_open_modes(config) else config


def choose_cheapest_modes(config: Config, estimator: Estimator) -> ModeChoice:
    """Choose the cheapest modes with which a micro-batch of `batch.micro_size`, or otherwise of the smallest size, fits
    the limit, for a configuration that leaves them open.
    """
    planner = Planner(config, estimator)
    size = planner.configured or planner.smallest
    peaks = _peaks_by_mode(planner, size)
    totals = {mode: breakdown.total for mode, breakdown in peaks.items()}
    modes = choose_modes(totals, planner.allowed_peak, peaks["none"].blocks)
    settings = replace(config.activation_checkpointing, modes=modes)
    return ModeChoice(replace(config, activation_checkpointing=settings), planner, size, peaks)


def _peaks_by_mode(planner: Planner, size: int) -> dict[Mode, Breakdown]:
    """Return the breakdown with all blocks in each mode, at one micro-batch size."""
    # Until modes are chosen, a configuration is one without checkpointing.
    config = planner.config
    peaks: dict[Mode, Breakdown] = {"none": planner.peak(size)}
    for mode in MODES:
        if mode not in peaks:
            settings = replace(config.activation_checkpointing, mode=mode)
            with_mode = replace(config, activation_checkpointing=settings)
            peaks[mode] = Planner(with_mode, planner.estimator).peak(size)
    return peaks


def _lowest(peaks: Mapping[Mode, Breakdown]) -> Breakdown:
    return min(peaks.values(), key=lambda breakdown: breakdown.total)
