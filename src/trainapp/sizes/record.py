"""The micro-batch sizes that a run starts with, and what checkpoints and restarted workers know of them."""

import contextlib
import json
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config
from trainapp.data.source import TrainBatches
from trainapp.files import atomic_write, strict_json
from trainapp.parallel.ranks import Ranks
from trainapp.sizes.autotuner import Autotuner
from trainapp.sizes.micro_batches import MicroBatchSizes, Plan

RESTART = "restart.json"  # in the run directory: what a worker that ran out of memory leaves for the restarted ones
EVALUATION = "eval_micro"


class Sizes:
    """Micro-batch sizes, in samples per forward on one rank. `train` are those of the update that `turn_to` has chosen:
    another loss needs other sizes.

    by_update: by name, which is empty for the only update of a step. `oom_restarts`: the number of recoveries since the
    run began, in whatever process.
    """

    def __init__(self, by_update: dict[str, MicroBatchSizes], evaluation: MicroBatchSizes):
        self.by_update, self.evaluation = by_update, evaluation
        self.train, self.oom_restarts = next(iter(by_update.values())), 0
        self.autotuner: Autotuner | None = None

    def tunes(self, sizes: MicroBatchSizes) -> bool:
        """See `Autotuner.follow`."""
        return self.autotuner is not None and self.autotuner.follow(sizes)

    def turn_to(self, update: str) -> None:
        """Select the update whose sizes `train` are."""
        self.train = self.by_update[update]

    def micro_schedule(self) -> dict[Any, Any]:
        """What `batch.micro_schedule` takes to replay the run: by attempt, or with several updates such by name."""
        schedules = {name: as_schedule(own.used) for name, own in self.by_update.items()}
        return schedules.get("", schedules)

    def scalars(self, batches: TrainBatches) -> dict[str, float]:
        """What a log step records of the sizes."""
        return {
            "batch/global_size": batches.global_size,
            "batch/micro_size": self.train.size,
            "batch/accumulation": batches.accumulation(self.train.size),
            "batch/eval_micro_size": self.evaluation.size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Primitives only, for a checkpoint."""
        used = {name: own.used for name, own in self.by_update.items()}
        own = {key: sizes.state_dict() for key, sizes in self._by_key().items()}
        return own | {"used": used, "oom_restarts": self.oom_restarts}

    def continue_record(self, saved: dict[str, Any] | None, restart: dict[str, Any] | None) -> None:
        """Add to the record of a checkpoint instead of beginning a new one.

        The checkpoint knows neither of the error that has led back to it nor of those after it: `restart` counts them.
        """
        for name, used in (saved or {}).get("used", {}).items():
            if name in self.by_update:
                self.by_update[name].used = dict(used)
        self.oom_restarts = max((known or {}).get("oom_restarts", 0) for known in (saved, restart))

    def leave_for_restart(self, run_dir: Path, failing: MicroBatchSizes) -> None:
        """Leave the failing sizes, all that have failed before, which no checkpoint may hold yet, and the number of
        recoveries. Raises OSError where they cannot be written.
        """
        failed = {key: own.state_dict() for key, own in self._by_key().items() if own is failing or own.has_failed}
        with atomic_write(run_dir / RESTART) as file:
            file.write(strict_json(failed | {"oom_restarts": self.oom_restarts}))

    def _by_key(self) -> dict[str, MicroBatchSizes]:
        """All sizes by the names that they have in files."""
        return {_key_of(name): own for name, own in self.by_update.items()} | {EVALUATION: self.evaluation}


def take_restart(run_dir: Path, has_restarted: bool, ranks: Ranks) -> dict[str, Any] | None:
    """What `leave_for_restart` has left, once: the file is removed. None if there is nothing.

    Collective: rank 0 reads for all. has_restarted: False only removes what an earlier start has left.
    """
    restart = None
    if ranks.is_rank_zero:
        restart = read_restart(run_dir)
        with contextlib.suppress(OSError):
            (run_dir / RESTART).unlink(missing_ok=True)
    restart = ranks.all_gather_object(restart)[0]
    return restart if has_restarted else None


def read_restart(run_dir: Path) -> dict[str, Any] | None:
    """What was left; None if there is nothing, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_dir / RESTART).read_text())
    return None


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
) -> Sizes:
    """The micro-batch sizes that a run starts with. For training, the first of these that is known:

    1. `restart`: what workers that ran out of memory have left. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry that applies to the coming attempt; later ones replace any of the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, found in the same amount of memory (the caller passes None otherwise).
    5. This rank's share of the global batch.

    For evaluation: `restart`, `batch.eval_micro_size=N`, `saved`, twice this rank's share.

    global_size: samples per optimizer step over all ranks. eval_samples: the same of an evaluation. attempts: finished
    steps, skipped ones included. smallest: some models cannot train on single samples. whole: batches are never cut.
    retries_in_place: whether a size that fails costs one retried step; where it costs a restart of all workers, no
    larger size is tried. restart, saved: as `Sizes.state_dict` returns them; `restart` may have only one of the two.
    """
    batch, restart, saved = config.batch, restart or {}, saved or {}
    share, eval_share = -(-global_size // world), -(-eval_samples // world)
    given, grows = _given(config, share), retries_in_place and not whole and _may_grow(config)

    def new(start: int, smallest: int) -> MicroBatchSizes:
        return MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=start if whole else smallest)

    by_update = {}
    for name in [update.name for update in config.updates] or [""]:
        own, key = new(given or share, smallest), _key_of(name)
        own.schedule = _from_attempt(batch.schedules.get(name, {}), attempts + 1, share)
        if key in restart:
            own.load_state_dict(restart[key], is_lower=True)
            own.schedule.pop(attempts + 1, None)
        elif own.schedule:
            own.follow_schedule(attempts + 1)
        elif given is None:
            _load(own, saved.get(key))
        by_update[name] = own
    # Never more than this rank has: a size that is never reached is never validated.
    most = batch.eval_micro_size if isinstance(batch.eval_micro_size, int) else share if whole else 2 * share
    evaluation = new(min(most, eval_share), 1)
    if EVALUATION in restart:
        evaluation.load_state_dict(restart[EVALUATION], is_lower=True)
    elif batch.eval_micro_size == "auto":
        _load(evaluation, saved.get(EVALUATION))
    return Sizes(by_update, evaluation)


def _given(config: Config, share: int) -> int | None:
    """The size that the configuration names for training; None where it is to be found."""
    steps, size = config.accumulation.steps, config.batch.micro_size
    if steps != "auto":
        return -(-share // steps)
    return min(size, share) if isinstance(size, int) else None


def _may_grow(config: Config) -> bool:
    return config.oom.grow and config.batch.micro_schedule is None and config.accumulation.steps == "auto"


def _load(sizes: MicroBatchSizes, saved: dict[str, Any] | None) -> None:
    """What a checkpoint has found, if anything."""
    if saved and saved["buckets"]:
        sizes.load_state_dict(saved)


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


def _key_of(update: str) -> str:
    """The key of this update's sizes in a file. The only update of a step has no name."""
    return f"micro.{update}" if update else "micro"


def as_schedule(used: Mapping[int, Mapping[int, int]]) -> dict[int, Plan]:
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
