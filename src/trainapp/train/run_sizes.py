"""The micro-batch sizes of a run: of evaluation, and of each update's training, with what a replay needs to know."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from trainapp.data.micro_batch_sizes import MicroBatchSizes, Plan
from trainapp.data.source import TrainBatches
from trainapp.parallel.ranks import Ranks

Recorded = dict[int, dict[int, int]]  # by attempt, the size of each bucket
log = logging.getLogger(__name__)


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
    recorded: Recorded = field(default_factory=dict)  # that this rank used since the run began, in whatever process
    origin: str = "share"  # what decided the size: see `initial_sizes`


def key_of(update: str) -> str:
    """The key of this update's sizes in a file. The only update of a step has no name."""
    return f"micro.{update}" if update else "micro"


class Sizes:
    """Micro-batch sizes, in samples per forward on one rank. `train`, `schedule`, `recorded` and `origin` are those of
    the update that `turn_to` has chosen: another loss needs other sizes.

    parts: `accumulation.steps`, the minimum number of micro-batches per step. updates: their names; empty for the only
    one. Attributes since the run began, in whatever process: `oom_restarts`, the number of recoveries; `not_replayed`,
    what a replay of these sizes does not repeat.
    """

    def __init__(
        self,
        train: MicroBatchSizes,
        evaluation: MicroBatchSizes,
        parts: int | None = None,
        updates: Sequence[str] = ("",),
    ):
        self.evaluation, self.parts = evaluation, parts
        self.by_update = {
            name: OfUpdate(
                MicroBatchSizes(train.start, train.clean_steps, train.grow, train.smallest) if number else train
            )
            for number, name in enumerate(updates)
        }
        self._current = self.by_update[updates[0]]
        self.oom_restarts = 0
        self.not_replayed: set[str] = set()

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

    @schedule.setter
    def schedule(self, schedule: dict[int, Plan]) -> None:
        self._current.schedule = schedule

    @property
    def recorded(self) -> Recorded:
        """The sizes that the update has used on this rank."""
        return self._current.recorded

    @property
    def origin(self) -> str:
        """What decided the update's first size."""
        return self._current.origin

    @origin.setter
    def origin(self, origin: str) -> None:
        self._current.origin = origin

    def begin_with(self, planned: PlannedSizes) -> None:
        """Start with sizes that a plan expects to fit."""
        self.train.start = max(self.train.smallest, min(planned.train, self.train.start))
        if planned.evaluation is not None and not self.evaluation.searches:
            self.evaluation.start = min(planned.evaluation, self.evaluation.start)
        self.origin = "planned"

    def follow_schedule(self, attempt: int) -> None:
        """Apply the schedule's entry for this attempt, if any."""
        if attempt in self.schedule:
            for size in self.train.follow(self.schedule.pop(attempt)):
                log.warning(
                    "batch.micro_schedule: %d from step %d has failed in this run; the micro-batch stays at %d",
                    size,
                    attempt,
                    self.train.size,
                )

    def record(self, attempt: int) -> bool:
        """Record the sizes of a finished attempt. Returns whether they differ from those of the one before."""
        plan = self.train.as_plan()
        if next(reversed(self.recorded.values()), None) == plan:
            return False
        self.recorded[attempt] = plan
        return True

    @property
    def used(self) -> dict[int, Plan]:
        """This rank's record as a schedule, which replays the run on one rank; for several see `history`."""
        return as_schedule(self.recorded)

    def history(self, ranks: Ranks) -> dict[str, Any]:
        """The records of all ranks, for a checkpoint or the result. Primitives only. Collective."""
        recorded = {name: own.recorded for name, own in self.by_update.items()}
        by_rank = ranks.all_gather_object((recorded, self.oom_restarts, self.not_replayed))
        records, restarts, not_replayed = zip(*by_rank, strict=True)
        used = {name: _merged([own[name] for own in records]) for name in self.by_update}
        return {
            "used": used.get("", used),
            "oom_restarts": max(restarts),  # a rank that evaluates alone recovers alone
            "not_replayed": sorted(set().union(*not_replayed)),
        }

    def happened(self) -> dict[str, Any]:
        """What the next process or run must know in addition to the sizes, see `continue_history`. Primitives only."""
        return {"oom_restarts": self.oom_restarts, "not_replayed": sorted(self.not_replayed)}

    def continue_history(self, saved: dict[str, Any] | None, hint: dict[str, Any] | None) -> None:
        """Add to the record of a checkpoint instead of beginning a new one.

        The checkpoint knows neither of the error that has led back to it nor of those after it: `hint` counts them.
        """
        known, failed = saved or {}, hint or {}
        used = known.get("used", {})
        for name, own in self.by_update.items():
            own.recorded = dict(used.get(name, {}) if name else used)
        counts = (known.get("oom_restarts"), failed.get("oom_restarts"))
        self.oom_restarts = max((count for count in counts if type(count) is int and 0 <= count < 2**31), default=0)
        reasons = [*_strings(known.get("not_replayed")), *_strings(failed.get("not_replayed"))]
        self.not_replayed = set(reasons)

    def scalars(self, batches: TrainBatches) -> dict[str, float]:
        """What a log step records of the sizes."""
        return {
            "batch/global_size": batches.global_size,
            "batch/micro_size": self.train.size,
            "batch/accumulation": batches.accumulation(self.train.size, self.parts),
            "batch/eval_micro_size": self.evaluation.size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Primitives only, for a checkpoint or for the next run of the same configuration."""
        return {key: sizes.state_dict() for key, sizes in self.by_key().items()}

    def by_key(self) -> dict[str, MicroBatchSizes]:
        """All sizes by the names that they have in files."""
        train = {key_of(name): own.train for name, own in self.by_update.items()}
        return train | {"eval_micro": self.evaluation}


def as_schedule(recorded: Recorded) -> dict[int, Plan]:
    """As short as possible: one number where the sizes of all shapes are equal, and only where they change."""
    schedule: dict[int, Plan] = {}
    for attempt, sizes in sorted(recorded.items()):
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


def _merged(by_rank: list[Recorded]) -> Recorded:
    """One record for all ranks. They agree on the size of a shape, but not all have seen each shape."""
    merged: Recorded = {}
    in_force: list[dict[int, int]] = [{} for _ in by_rank]
    for attempt in sorted(set().union(*by_rank)):
        in_force = [own.get(attempt, before) for own, before in zip(by_rank, in_force, strict=True)]
        buckets = sorted(set().union(*in_force))
        merged[attempt] = {bucket: max(sizes.get(bucket, 0) for sizes in in_force) for bucket in buckets}
    return merged


def _strings(value: Any) -> list[str]:
    """The strings in a list that comes from a file."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
