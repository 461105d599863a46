"""All micro-batch sizes of a run, and their record: in checkpoints, in result.json and for restarted workers."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config
from trainapp.files import atomic_write, json_object, strict_json
from trainapp.parallel.ranks import Ranks
from trainapp.sizes.micro_batches import Autotuner, MicroBatchSizes, Plan

RESTART = "restart.json"  # in the run directory: written by a worker that ran out of memory, for the restarted ones
EVALUATION = "eval_micro"


@dataclass
class Sizes:
    """Micro-batch sizes, in samples per forward on one rank. `train`: the sizes of the update chosen by `turn_to`."""

    by_update: dict[str, MicroBatchSizes]  # by the update's name, "" for a step's only update
    evaluation: MicroBatchSizes
    autotuner: Autotuner
    oom_restarts: int  # recoveries from out-of-memory errors since the run began, over all its processes
    recoveries: int  # these, and those from micro-batches with too few samples for the model

    def __post_init__(self) -> None:
        self.train = next(iter(self.by_update.values()))

    def turn_to(self, update: str) -> None:
        """Select the update whose sizes are in `train`."""
        self.train = self.by_update[update]

    def micro_schedule(self) -> dict[Any, Any]:
        """Sizes for `batch.micro_schedule` that replay the run: by attempt; with several updates, one schedule per
        name.
        """
        schedules = {name: as_schedule(own.used) for name, own in self.by_update.items()}
        return schedules.get("", schedules)

    def usual_sizes(self, attempts: int) -> dict[str, int]:
        """Return the size with which most steps of the run were made, by update. attempts: all steps, also skipped."""
        return {name: _usual_size(own, attempts) for name, own in self.by_update.items()}

    def state_dict(self) -> dict[str, Any]:
        """Primitives only, for a checkpoint."""
        used = {name: own.used for name, own in self.by_update.items()}
        own = {key: sizes.state_dict() for key, sizes in self._by_key().items()}
        return own | {"used": used} | self._counts()

    def leave_for_restart(self, run_dir: Path, failing: MicroBatchSizes) -> None:
        """Write restart.json: the failing sizes, earlier failures, which may be in no checkpoint yet, and the counts of
        recoveries. Raises OSError if it cannot be written.
        """
        failed = {
            key: own.state_dict()
            for key, own in self._by_key().items()
            if own is failing or any(search.fails is not None for search in own.searches.values())
        }
        with atomic_write(run_dir / RESTART) as file:
            file.write(strict_json(failed | self._counts()))

    def _counts(self) -> dict[str, int]:
        return {"oom_restarts": self.oom_restarts, "recoveries": self.recoveries}

    def _by_key(self) -> dict[str, MicroBatchSizes]:
        return {key_of(name): own for name, own in self.by_update.items()} | {EVALUATION: self.evaluation}


def take_restart(run_dir: Path, has_restarted: bool, ranks: Ranks) -> dict[str, Any]:
    """Read and remove restart.json; empty without one.

    Collective: rank 0 reads for all. has_restarted: False only removes the file of an earlier start.
    """
    restart: dict[str, Any] = {}
    if ranks.is_rank_zero:
        restart = json_object(run_dir / RESTART)
        with contextlib.suppress(OSError):
            (run_dir / RESTART).unlink(missing_ok=True)
    restart = ranks.all_gather_object(restart)[0]
    return restart if has_restarted else {}


def given_size(config: Config, share: int) -> int | None:
    """The configured micro-batch size for training, at most this rank's share; None if it is to be found."""
    steps, size = config.accumulation.steps, config.batch.micro_size
    if steps != "auto":
        return -(-share // steps)
    return min(size, share) if isinstance(size, int) else None


def key_of(update: str) -> str:
    """The key of an update's sizes in a file. A step's only update has no name."""
    return f"micro.{update}" if update else "micro"


def _usual_size(sizes: MicroBatchSizes, attempts: int) -> int:
    """Return the size of most steps; of a step with several shapes, the largest of its sizes."""
    steps_of: Counter[int] = Counter()
    starts = sorted(sizes.used)
    for start, end in zip(starts, [*starts[1:], attempts + 1], strict=True):
        steps_of[max(sizes.used[start].values(), default=sizes.size)] += end - start
    if not steps_of:
        return sizes.size
    return steps_of.most_common(1)[0][0]


def as_schedule(used: Mapping[int, Mapping[int, int]]) -> dict[int, Plan]:
    """The shortest equivalent schedule: one number if all shapes have the same size, and only changes."""
    schedule: dict[int, Plan] = {}
    for attempt, sizes in sorted(used.items()):
        distinct = set(sizes.values())
        plan: Plan = distinct.pop() if len(distinct) == 1 else dict(sorted(sizes.items()))
        if next(reversed(schedule.values()), None) != plan:
            schedule[attempt] = plan
    return schedule


def shown(sizes: MicroBatchSizes) -> str:
    """The size in words; if shapes of data differ, one size per shape, smallest samples first."""
    by_shape = sorted((bucket, search.size) for bucket, search in sizes.searches.items())
    if len({size for _, size in by_shape}) < 2:
        return str(sizes.size)
    ranges = [[bucket for bucket, _ in own] for _, own in groupby(by_shape, key=itemgetter(1))]
    return ", ".join(f"{sizes.searches[buckets[-1]].size}{shape_of(sizes, buckets[-1])}" for buckets in ranges)


def shape_of(sizes: MicroBatchSizes, bucket: int) -> str:
    """Suffix naming the shape, if there are several."""
    return f" for up to {bucket} elements per sample" if len(sizes.searches) > 1 else ""
