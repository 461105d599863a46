"""The micro-batch sizes of a run: those that it starts with, those that it uses, and a replay of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from trainapp.config.schema import Config
from trainapp.data.source import TrainBatches
from trainapp.sizes.micro_batches import MicroBatchSizes, Plan

Used = dict[int, dict[int, int]]  # by attempt, the size of each bucket from then on


class PlannedSizes(NamedTuple):
    """Sizes that a plan expects to fit. evaluation: None where there is none, or none was asked for."""

    train: int
    evaluation: int | None


@dataclass
class OfUpdate:
    """The sizes of one update's training."""

    train: MicroBatchSizes
    # `batch.micro_schedule`: sizes by the attempt from which they apply. A step that is skipped is an attempt, too.
    schedule: dict[int, Plan] = field(default_factory=dict)
    used: Used = field(default_factory=dict)  # since the run began, in whatever process
    origin: str = "share"  # what decided the first size: see `initial_sizes`


class Sizes:
    """Micro-batch sizes, in samples per forward on one rank. `train`, `schedule` and `origin` are those of the update
    that `turn_to` has chosen: another loss needs other sizes.

    parts: `accumulation.steps`, the minimum number of micro-batches per step. updates: their names; empty for the only
    one. `oom_restarts`: the number of recoveries since the run began, in whatever process.
    """

    def __init__(
        self,
        train: MicroBatchSizes,
        evaluation: MicroBatchSizes,
        parts: int | None = None,
        updates: Sequence[str] = ("",),
    ):
        self.evaluation, self.parts, self.oom_restarts = evaluation, parts, 0
        self.by_update = {
            name: OfUpdate(MicroBatchSizes(train.start, train.clean_steps, train.grow, train.smallest))
            for name in updates
        }
        self._current = self.by_update[updates[0]]

    def turn_to(self, update: str) -> None:
        """Select the update whose sizes `train` and the others are."""
        self._current = self.by_update[update]

    def of_updates(self) -> tuple[int, ...]:
        """The size of each update, in order; none where there is only one update."""
        return tuple(own.train.size for own in self.by_update.values()) if len(self.by_update) > 1 else ()

    @property
    def train(self) -> MicroBatchSizes:
        """Of the update at work."""
        return self._current.train

    @train.setter
    def train(self, sizes: MicroBatchSizes) -> None:
        self._current.train = sizes

    @property
    def schedule(self) -> dict[int, Plan]:
        """What is left of the update's `batch.micro_schedule`."""
        return self._current.schedule

    @property
    def origin(self) -> str:
        """What decided the update's first size."""
        return self._current.origin

    def follow_schedule(self, attempt: int) -> None:
        """Apply the schedule's entry for this attempt, if any."""
        if attempt in self._current.schedule:
            self._current.train.follow(self._current.schedule.pop(attempt))

    def record(self, attempt: int) -> bool:
        """Record the sizes of a finished attempt, once the ranks have exchanged them. Returns whether they differ from
        those of the one before.
        """
        used, sizes = self._current.used, self._current.train.in_force
        if next(reversed(used.values()), None) == sizes:
            return False
        used[attempt] = sizes
        return True

    def micro_schedule(self) -> dict[Any, Any]:
        """What `batch.micro_schedule` takes to replay the run: by attempt, or with several updates such by name."""
        schedules = {name: as_schedule(own.used) for name, own in self.by_update.items()}
        return schedules.get("", schedules)

    def scalars(self, batches: TrainBatches) -> dict[str, float]:
        """What a log step records of the sizes."""
        return {
            "batch/global_size": batches.global_size,
            "batch/micro_size": self.train.size,
            "batch/accumulation": batches.accumulation(self.train.size, self.parts),
            "batch/eval_micro_size": self.evaluation.size,
        }

    def by_key(self) -> dict[str, MicroBatchSizes]:
        """All sizes by the names that they have in files."""
        train = {key_of(name): own.train for name, own in self.by_update.items()}
        return train | {"eval_micro": self.evaluation}

    def state_dict(self) -> dict[str, Any]:
        """Primitives only, for a checkpoint."""
        used = {name: own.used for name, own in self.by_update.items()}
        own = {key: sizes.state_dict() for key, sizes in self.by_key().items()}
        return own | {"used": used, "oom_restarts": self.oom_restarts}

    def continue_record(self, saved: dict[str, Any] | None, restart: dict[str, Any] | None) -> None:
        """Add to the record of a checkpoint instead of beginning a new one.

        The checkpoint knows neither of the error that has led back to it nor of those after it: `restart` counts them.
        """
        for name, used in (saved or {}).get("used", {}).items():
            if name in self.by_update:
                self.by_update[name].used = dict(used)
        self.oom_restarts = max((known or {}).get("oom_restarts", 0) for known in (saved, restart))


def initial_sizes(
    config: Config,
    world: int,
    global_size: int,
    eval_samples: int,
    *,
    smallest: int = 1,
    whole: bool = False,
    attempts: int = 0,
    retries_in_place: bool = True,
    restart: dict[str, Any] | None = None,
    saved: dict[str, Any] | None = None,
    planned: Callable[[], PlannedSizes | None] = lambda: None,
) -> Sizes:
    """The micro-batch sizes that a run starts with. For training, the first of these that is known:

    1. `restart`: what workers that ran out of memory have left. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry that applies to the coming attempt; later ones replace any of the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, found in the same amount of memory (the caller passes None otherwise).
    5. `planned`, for `batch.micro_size=plan`: the largest sizes that are predicted to fit. It is called only here.
    6. This rank's share of the global batch.

    For evaluation: `restart`, `batch.eval_micro_size=N`, `saved`, `planned` with training's, twice this rank's share
    (without gradients more fits).

    global_size: samples per optimizer step over all ranks. eval_samples: the same of an evaluation. attempts: finished
    steps, skipped ones included. smallest: some models cannot train on single samples. whole: batches are never cut.
    retries_in_place: whether a size that fails costs one retried step; where it costs a restart of all workers, no
    larger size is tried. restart, saved: as `Sizes.state_dict` returns them; `restart` may have only one of the two.
    """
    batch, share, restart, saved = config.batch, -(-global_size // world), restart or {}, saved or {}
    sizes = _as_configured(config, share, -(-eval_samples // world), smallest, retries_in_place, whole)
    plan = functools.cache(planned if batch.micro_size == "plan" else lambda: None)
    is_given = isinstance(batch.micro_size, int) or sizes.parts is not None
    for name, own in sizes.by_update.items():
        own.schedule = _from_attempt(batch.schedules.get(name, {}), attempts + 1, share)
        _begin_training(own, key_of(name), attempts + 1, restart, is_given, saved, plan)
    evaluation, key = sizes.evaluation, "eval_micro"
    if key in restart:
        evaluation.start = min(evaluation.start, restart[key]["start"])
        evaluation.load_state_dict(restart[key])
    elif batch.eval_micro_size == "auto" and saved.get(key, {}).get("buckets"):
        evaluation.load_state_dict(saved[key])
    elif sizes.origin == "planned" and (first := plan()) is not None and first.evaluation is not None:
        evaluation.start = min(first.evaluation, evaluation.start)
    return sizes


def _begin_training(
    own: OfUpdate,
    key: str,
    attempt: int,
    restart: dict[str, Any],
    is_given: bool,
    saved: dict[str, Any],
    plan: Callable[[], PlannedSizes | None],
) -> None:
    """The first size of an update, which the sources have under `key`."""
    if key in restart:
        own.train.start = min(own.train.start, restart[key]["start"])
        own.train.load_state_dict(restart[key])
        own.schedule.pop(attempt, None)
        own.origin = "restart"
    elif own.schedule:
        if attempt in own.schedule:
            own.train.follow(own.schedule.pop(attempt))
        own.origin = "schedule"
    elif is_given:
        own.origin = "given"
    elif saved.get(key, {}).get("buckets"):
        own.train.load_state_dict(saved[key])
        own.origin = "saved"
    elif (planned := plan()) is not None:
        own.train.start = max(own.train.smallest, min(planned.train, own.train.start))
        own.origin = "planned"


def _as_configured(
    config: Config, share: int, eval_share: int, smallest: int, retries_in_place: bool, whole: bool
) -> Sizes:
    """What the configuration says, for this rank's share of a training step and of an evaluation."""
    batch, parts = config.batch, config.accumulation.steps
    start = share
    if parts != "auto":
        start = -(-share // parts)
    elif isinstance(batch.micro_size, int):
        start = min(batch.micro_size, share)
    grows = config.oom.grow and config.oom.keep_global_batch and batch.micro_schedule is None and parts == "auto"
    grows = grows and retries_in_place and not whole
    # Never more than this rank has: a size that is never reached is never validated.
    most = share if whole else 2 * share
    eval_start = min(most if batch.eval_micro_size == "auto" else batch.eval_micro_size, eval_share)
    return Sizes(
        train=MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=start if whole else smallest),
        evaluation=MicroBatchSizes(eval_start, config.oom.clean_steps, grow=grows, smallest=eval_start if whole else 1),
        parts=None if parts == "auto" else parts,
        updates=[update.name for update in config.updates] or [""],
    )


def _from_attempt(schedule: Mapping[int, Plan], attempt: int, share: int) -> dict[int, Plan]:
    """The rest of a schedule: what applies at `attempt`, and what comes later. No size is above this rank's share."""
    cut = {
        entry: {bucket: min(size, share) for bucket, size in plan.items()}
        if isinstance(plan, dict)
        else min(plan, share)
        for entry, plan in schedule.items()
    }
    later = {entry: plan for entry, plan in cut.items() if entry > attempt}
    in_force = max((entry for entry in cut if entry <= attempt), default=None)
    return later if in_force is None else {attempt: cut[in_force], **later}


def key_of(update: str) -> str:
    """The key of this update's sizes in a file. The only update of a step has no name."""
    return f"micro.{update}" if update else "micro"


def as_schedule(used: Used) -> dict[int, Plan]:
    """As short as possible: one number where the sizes of all shapes are equal, and only where they change."""
    schedule: dict[int, Plan] = {}
    for attempt, sizes in sorted(used.items()):
        distinct = set(sizes.values())
        plan: Plan = distinct.pop() if len(distinct) == 1 else dict(sorted(sizes.items()))
        if next(reversed(schedule.values()), None) != plan:
            schedule[attempt] = plan
    return schedule


def shown(sizes: MicroBatchSizes) -> str:
    """The size in words; where shapes of data have different ones, that of each, the smallest samples first."""
    by_shape = sorted((bucket, search.size) for bucket, search in sizes.searches.items())
    if len({size for _, size in by_shape}) < 2:
        return str(sizes.size)
    ranges = [[bucket for bucket, _ in own] for _, own in groupby(by_shape, key=itemgetter(1))]
    return ", ".join(f"{sizes.searches[buckets[-1]].size}{shape_of(sizes, buckets[-1])}" for buckets in ranges)


def shape_of(sizes: MicroBatchSizes, bucket: int) -> str:
    """Behind a size in words: the shape that it is for, where there are several."""
    return f" for up to {bucket} elements per sample" if len(sizes.searches) > 1 else ""
