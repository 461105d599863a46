"""The micro-batch sizes that a run starts with, and their record in checkpoints and for restarted workers."""

import contextlib
import json
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from trainapp.config.schema import Config
from trainapp.files import atomic_write, strict_json
from trainapp.parallel.ranks import Ranks
from trainapp.sizes.micro_batches import MicroBatchSizes, Plan

RESTART = "restart.json"  # in the run directory: written by a worker that ran out of memory, for the restarted ones
EVALUATION = "eval_micro"


class Autotuner:
    """cuDNN's autotuner, switched on only while the current sizes are settled.

    With `cudnn.benchmark`, the first convolution of each shape times the algorithms, with workspaces that may not fit,
    and then empties the allocator's cache. A search for the micro-batch size would pay that for every convolution at
    every size it tries, and mistake failed workspaces for a size that does not fit.

    Switching it on later is not enough: torch keeps one plan per shape, chosen by heuristics or timed, and does not
    time a shape that has a plan (`run_single_conv` in aten/src/ATen/native/cudnn/Conv_v8.cpp, read in torch 2.4;
    verified in tests/gpu). But the key of that cache includes `cudnn.deterministic`. Unsettled sizes therefore run with
    deterministic algorithms, and the first step with a settled size finds no plan.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._is_on: bool | None = None  # None: not set yet
        self._settled: set[int] = set()  # ids of sizes

    def follow(self, sizes: MicroBatchSizes) -> bool:
        """Call before work that uses these sizes. True for the first work after the sizes have settled, in which
        algorithms are timed: this may need more memory than was validated. Equal on all ranks that share the sizes.
        """
        if not self.enabled:
            return False
        is_settled = sizes.search_has_ended and not sizes.is_unvalidated
        if is_settled is not self._is_on:
            torch.backends.cudnn.benchmark = self._is_on = is_settled
            torch.backends.cudnn.deterministic = not is_settled
        is_first = is_settled and id(sizes) not in self._settled
        if is_settled:
            self._settled.add(id(sizes))
        else:
            self._settled.discard(id(sizes))
        return is_first


class Sizes:
    """Micro-batch sizes, in samples per forward on one rank. `train`: the sizes of the update chosen by `turn_to`.

    by_update: sizes by the update's name, "" for a step's only update. `oom_restarts`: the number of recoveries since
    the run began, over all its processes.
    """

    def __init__(
        self,
        by_update: dict[str, MicroBatchSizes],
        evaluation: MicroBatchSizes,
        autotunes: bool = False,
        oom_restarts: int = 0,
    ):
        self.by_update, self.evaluation, self.train = by_update, evaluation, next(iter(by_update.values()))
        self.autotuner, self.oom_restarts = Autotuner(autotunes), oom_restarts

    def turn_to(self, update: str) -> None:
        """Select the update whose sizes are in `train`."""
        self.train = self.by_update[update]

    def micro_schedule(self) -> dict[Any, Any]:
        """Sizes for `batch.micro_schedule` that replay the run: by attempt; with several updates, one schedule per
        name.
        """
        schedules = {name: as_schedule(own.used) for name, own in self.by_update.items()}
        return schedules.get("", schedules)

    def state_dict(self) -> dict[str, Any]:
        """Primitives only, for a checkpoint."""
        used = {name: own.used for name, own in self.by_update.items()}
        own = {key: sizes.state_dict() for key, sizes in self._by_key().items()}
        return own | {"used": used, "oom_restarts": self.oom_restarts}

    def leave_for_restart(self, run_dir: Path, failing: MicroBatchSizes) -> None:
        """Write restart.json: the failing sizes, earlier failures, which may be in no checkpoint yet, and the number of
        recoveries. Raises OSError if it cannot be written.
        """
        failed = {
            key: own.state_dict()
            for key, own in self._by_key().items()
            if own is failing or any(search.fails is not None for search in own.searches.values())
        }
        with atomic_write(run_dir / RESTART) as file:
            file.write(strict_json(failed | {"oom_restarts": self.oom_restarts}))

    def _by_key(self) -> dict[str, MicroBatchSizes]:
        """All sizes by their keys in files."""
        return {_key_of(name): own for name, own in self.by_update.items()} | {EVALUATION: self.evaluation}


def take_restart(run_dir: Path, has_restarted: bool, ranks: Ranks) -> dict[str, Any] | None:
    """Read and remove restart.json; None without one.

    Collective: rank 0 reads for all. has_restarted: False only removes the file of an earlier start.
    """
    restart = None
    if ranks.is_rank_zero:
        restart = read_restart(run_dir)
        with contextlib.suppress(OSError):
            (run_dir / RESTART).unlink(missing_ok=True)
    restart = ranks.all_gather_object(restart)[0]
    return restart if has_restarted else None


def read_restart(run_dir: Path) -> dict[str, Any] | None:
    """The content of restart.json; None if it is missing or unreadable."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_dir / RESTART).read_text())
    return None


def initial_sizes(
    config: Config,
    world: int,
    eval_samples: int,
    *,
    smallest: int = 1,
    whole: bool = False,
    attempts: int = 0,
    retries_in_place: bool = True,
    restart: dict[str, Any] | None = None,
    saved: dict[str, Any] | None = None,
    same_memory: bool = True,
    autotunes: bool = False,
) -> Sizes:
    """The micro-batch sizes that a run starts with. For training, the first of these that is known:

    1. `restart`: from workers that ran out of memory. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry for the coming attempt; its later entries override all the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, if found with the same memory budget.
    5. This rank's share of the global batch.

    For evaluation: `restart`, `batch.eval_micro_size=N`, `saved`, twice this rank's share.

    eval_samples: samples per evaluation over all ranks. attempts: finished steps, including skipped ones. smallest:
    some models cannot train on single samples. whole: batches are never cut. retries_in_place: whether a failing size
    costs only a retried step; if it costs a restart of all workers, no larger size is tried. restart, saved: from
    `Sizes.state_dict`, whose record is continued; `restart` may lack one of the keys. autotunes: see `Autotuner`.
    """
    batch, restart, saved = config.batch, restart or {}, saved or {}
    found = saved if same_memory else {}
    share, eval_share = -(-batch.global_size // world), -(-eval_samples // world)
    is_fixed = whole or batch.micro_schedule is not None or config.accumulation.steps != "auto"
    given, grows = _given(config, share), retries_in_place and config.oom.grow and not is_fixed

    def new(start: int, smallest: int) -> MicroBatchSizes:
        return MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=start if whole else smallest)

    by_update = {}
    for name in [update.name for update in config.updates] or [""]:
        by_update[name] = own = new(given or share, smallest)
        own.used = dict(saved.get("used", {}).get(name, {}))
        own.schedule = _from_attempt(batch.schedules.get(name, {}), attempts + 1, share)
        _begin(own, _key_of(name), attempts + 1, restart, found if given is None else {})
    # At most this rank's samples: a size that is never reached is never validated.
    most = batch.eval_micro_size if isinstance(batch.eval_micro_size, int) else share if whole else 2 * share
    evaluation = new(min(most, eval_share), 1)
    _begin(evaluation, EVALUATION, attempts + 1, restart, found if batch.eval_micro_size == "auto" else {})
    # The checkpoint predates the latest errors, which `restart` counts.
    restarts = max(known.get("oom_restarts", 0) for known in (saved, restart))
    return Sizes(by_update, evaluation, autotunes, restarts)


def _begin(own: MicroBatchSizes, key: str, attempt: int, restart: dict[str, Any], found: dict[str, Any]) -> None:
    """Start from the first that is known: `restart`, the schedule, the checkpoint's sizes."""
    if key in restart:
        own.load_state_dict(restart[key], is_lower=True)
        own.schedule.pop(attempt, None)
    elif own.schedule:
        own.follow_schedule(attempt)
    elif key in found and found[key]["buckets"]:
        own.load_state_dict(found[key])


def _given(config: Config, share: int) -> int | None:
    """The configured size for training; None if it is to be found."""
    steps, size = config.accumulation.steps, config.batch.micro_size
    if steps != "auto":
        return -(-share // steps)
    return min(size, share) if isinstance(size, int) else None


def _from_attempt(schedule: Mapping[int, Plan], attempt: int, share: int) -> dict[int, Plan]:
    """The rest of a schedule: the entry for `attempt` and later ones. No size exceeds this rank's share."""
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
    """The key of an update's sizes in a file. A step's only update has no name."""
    return f"micro.{update}" if update else "micro"


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
