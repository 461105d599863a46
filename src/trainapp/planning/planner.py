"""The plan of a configuration: its peak by category, the largest sizes that fit, and the savings of techniques."""

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainapp.assembly.resolved_targets import choose_device, resolve_targets
from trainapp.config.schema import Config
from trainapp.data.stream_reader import at_most
from trainapp.errors import UserError
from trainapp.losses.contrastive import require_uncut
from trainapp.losses.losses import needs_whole_batch
from trainapp.memory.host import guarded, total_bytes
from trainapp.memory.live_tensors import MemoryLimitExceeded
from trainapp.memory.picture import Picture, draw
from trainapp.planning import absent_gpu, pretend
from trainapp.planning.measured import MeasuredEstimator
from trainapp.planning.process import MemoryPlan, call_in_subprocess
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import world_of
from trainapp.planning.traced import TracedEstimator
from trainapp.sizes.record import configured_size
from trainapp.sizes.search import PeakSample, SizeSearch
from trainapp.techniques.checkpointing import Mode, choose_modes

Facts = dict[str, Any]
Estimator = TracedEstimator | MeasuredEstimator  # estimates the memory that a configuration needs
MODES: tuple[Mode, ...] = ("none", "selective", "full")


class Planner:
    """Estimates one configuration at the sizes that its plan needs, each at most once.

    share: samples of a step on the rank with the most. whole: whether a batch is never cut, so that only its own size
    is possible. room: largest allowed peak in bytes, after the estimator's margin.
    """

    def __init__(self, config: Config, estimator: Estimator):
        self.config, self.estimator = config, estimator
        self.limit, targets = estimator.limit(config), estimator.targets
        self.room = int(self.limit / (1 + estimator.spare))
        self.whole = needs_whole_batch(targets.task)
        self.share = -(-at_most(config.batch.global_size, targets.train_data) // estimator.world_size)
        self.peak: Callable[[int], Breakdown] = functools.cache(functools.partial(estimator.peak, config))

    def fits(self, size: int) -> bool:
        """Whether micro-batches of this size stay within the limit, including the margin."""
        return self.peak(size).total <= self.room

    @functools.cached_property
    def smallest(self) -> int:
        """The fewest samples on which the model can train, at most a rank's share."""
        return self.share if self.whole else min(self.peak(self.share).smallest, self.share)

    @property
    def given(self) -> int | None:
        """The configured micro-batch size, if any."""
        batch = self.config.batch
        if batch.micro_schedule is not None:
            plans = [plan for own in batch.schedules.values() for plan in own.values()]
            return min(self.share, max(max(plan.values()) if isinstance(plan, dict) else plan for plan in plans))
        return configured_size(self.config, self.share)

    @functools.cached_property
    def largest(self) -> int:
        """The largest micro-batch that fits, 0 if none does."""
        return largest_size(lambda size: self.peak(size).total, self.room, self.share, self.smallest)

    def plan(self) -> tuple[MemoryPlan, Breakdown]:
        """The plan at the configured size, otherwise the largest that fits, otherwise the smallest."""
        config, world_size = self.config, self.estimator.world_size
        if self.whole:
            require_uncut(config, world_size, at_most(config.batch.global_size, self.estimator.targets.train_data))
        size = self.given or self.largest or self.smallest
        found = self.peak(size)
        plan = MemoryPlan(
            self.estimator.method,
            self.estimator.margin,
            notes=list(found.notes),
            peak_bytes=found.total,
            phase=found.phase,
            module=found.module,
            phases=found.phases,
            categories=found.categories,
            ranks={
                "world": world_size,
                "strategy": config.parallel.strategy,
                "replicas": config.parallel.fsdp.replicas if config.parallel.strategy == "fsdp" else world_size,
            },
            micro_size=size,
            largest_micro_size=self.largest,
            limit_bytes=self.limit,
            modes=config.activation_checkpointing.modes,
        )
        return plan, found


def largest_size(peak: Callable[[int], int], room: int, top: int, smallest: int) -> int:
    """The largest size from `smallest` to `top` whose peak is at most `room` bytes, by the search of a run, which ends
    within 5% of it if the peak has no jumps; 0 if none is.
    """
    if top < 1 or peak(top) <= room:
        return top
    search = SizeSearch(smallest, clean_steps=1, smallest=smallest, smallest_failing=top, search_has_ended=False)
    while smallest < top:
        try:
            needed = peak(search.size)
        except (UserError, MemoryError, MemoryLimitExceeded):
            raise
        except Exception:
            if search.size > 1:
                raise
            search.size = search.smallest = 2  # some models do not accept single samples
            continue
        if needed > room and not search.record_failure(search.size):
            break
        if needed <= room and search.fitted(search.size, PeakSample(needed, room)) is None:
            return search.size
    return 0


def with_modes(config: Config, estimator: Estimator) -> Config:
    """`activation_checkpointing=auto`: the configuration with each block's cheapest mode with which a micro-batch of
    `batch.micro_size`, or otherwise of the smallest size, fits the limit.
    """
    settings = config.activation_checkpointing
    if settings.mode != "auto" or settings.modes is not None:
        return config
    planner = Planner(config, estimator)  # without checkpointing until modes are chosen
    size = planner.given or planner.smallest
    peaks: dict[Mode, int] = {"none": planner.peak(size).total}
    for mode in MODES[1:]:
        own = replace(config, activation_checkpointing=replace(settings, mode=mode))
        peaks[mode] = Planner(own, estimator).peak(size).total
    modes = choose_modes(peaks, planner.room, planner.peak(size).blocks)
    return replace(config, activation_checkpointing=replace(settings, modes=modes))


def plan(config: Config, method: str = "traced", only_modes: bool = False) -> tuple[Facts, Breakdown]:
    """The content of plan.json, and the highest peak with its events. Sets global switches of this process.

    method: see `process.METHODS`. only_modes: only choose the blocks' modes. Raises UserError for mistakes in the
    configuration, and errors of the model on tensors without data.
    """
    from trainapp.planning.ranking import ranked

    started = time.monotonic()
    estimator = estimator_of(config, method)
    given = config if config.plan.device is None else absent_gpu.on_cpu(config)
    planner = Planner(with_modes(given, estimator), estimator)
    if only_modes:
        return asdict(MemoryPlan(estimator.method, modes=planner.config.activation_checkpointing.modes)), Breakdown()
    plan, found = planner.plan()
    if config.plan.techniques:
        plan.techniques, plan.best = ranked(planner, plan)
    plan.seconds = round(time.monotonic() - started, 3)
    return asdict(plan), found


def answer(config: Config, picture: Path | None, only_modes: bool, method: str) -> Facts:
    """The answer for `process.ask`: the facts of `plan`. A trace for this machine's GPU is taken in a process that does
    not see it. Raises as `plan`.

    picture: also draw the step to this PNG.
    """
    own = choose_device(config.train.device) if config.plan.device is None else None
    if method != "measured" and own is not None and own.type == "cuda":
        named = absent_gpu.named(config, own)
        return call_in_subprocess(f"{__name__}.answer", named, picture, only_modes, method, sees_devices=False)
    if method == "traced" and own is not None and own.type == "mps":
        raise NotImplementedError("no trace knows what MPS allocates")
    with guarded(config.memory, total_bytes()):  # the user's code may allocate real memory
        facts, found = plan(config, method, only_modes)
    if picture is not None and found.events:
        title = f"planned memory, micro-batch {facts['micro_size']}: {found.phase.replace('_', ' ')} binds"
        draw(Picture(found.events, found.numbered, facts["limit_bytes"], title, picture))
    return facts


def estimator_of(config: Config, method: str) -> Estimator:
    """The estimator for a method. Raises UserError for settings that contradict each other."""
    world_size, gpu = world_of(config), None
    if config.plan.device is not None:
        gpu, config = absent_gpu.find(config), absent_gpu.on_cpu(config)
    targets = resolve_targets(config)
    if method == "measured":
        return MeasuredEstimator(targets, world_size, choose_device(config.train.device), gpu)
    if gpu is not None and method == "traced as on the CPU":
        gpu = replace(gpu, on_cpu=True, margin=0.3)
    elif gpu is not None:
        pretend.give_autograd_a_device()
    return TracedEstimator(targets, world_size, gpu, refuses=method != "made up")
