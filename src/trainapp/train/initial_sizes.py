"""The micro-batch sizes that a run starts with."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from trainapp.config import micro_schedule
from trainapp.config.schema import Batch, Config
from trainapp.data.micro_batch_sizes import MicroBatchSizes, Plan
from trainapp.train.run_sizes import PlannedSizes, Sizes, key_of


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
    hint: dict[str, Any] | None = None,
    saved: dict[str, Any] | None = None,
    planned: Callable[[], PlannedSizes | None] = lambda: None,
) -> Sizes:
    """The micro-batch sizes that a run starts with. For training, the first of these that is known:

    1. `hint`: what a restart of this run left behind. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry that applies to the coming attempt; later ones replace any of the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, found in the same amount of memory (the caller passes None otherwise).
    5. `planned`, for `batch.micro_size=plan`: the largest sizes that are predicted to fit. It is called only here.
    6. This rank's share of the global batch.

    For evaluation: `hint`, `batch.eval_micro_size=N`, `saved`, `planned` with training's, twice this
    rank's share (without gradients more fits).

    global_size: samples per optimizer step over all ranks. eval_samples: the same of an evaluation. attempts: finished
    steps, skipped ones included. smallest: some models cannot train on single samples. whole: batches are never cut.
    retries_in_place: whether a size that fails costs one retried step; where it costs a restart of all workers, no
    larger size is tried. hint, saved: as `Sizes.state_dict` returns them, `hint` may have only one of the
    two; damaged ones are ignored.
    """
    batch, hint, share = config.batch, hint or {}, -(-global_size // world)
    sizes = _as_configured(config, share, -(-eval_samples // world), smallest, retries_in_place, whole)
    planned = functools.cache(planned)
    for name in reversed(sizes.by_update):
        sizes.turn_to(name)
        own_schedule = micro_schedule.of_update(batch.micro_schedule, name)
        if own_schedule is not None:
            sizes.schedule = _from_attempt(own_schedule, attempts + 1, share)
        _begin_training(sizes, batch, key_of(name), attempts + 1, hint, saved, planned)
    _load_evaluation(sizes.evaluation, hint, saved if batch.eval_micro_size == "auto" else None)
    return sizes


def _begin_training(
    sizes: Sizes,
    batch: Batch,
    key: str,
    attempt: int,
    hint: dict[str, Any],
    saved: dict[str, Any] | None,
    planned: Callable[[], PlannedSizes | None],
) -> None:
    """The first size of the update at work, which the sources have under `key`."""
    if _is_valid(hint, key):
        sizes.train.start = min(sizes.train.start, hint[key]["start"])
        sizes.train.load_state_dict(hint[key])
        sizes.schedule.pop(attempt, None)
        sizes.origin = "hint"
    elif sizes.schedule:
        sizes.follow_schedule(attempt)
        sizes.origin = "schedule"
    elif isinstance(batch.micro_size, int) or sizes.parts is not None:
        sizes.origin = "given"
    elif _is_known(saved, key):
        sizes.train.load_state_dict(saved[key])
        sizes.origin = "saved"
    elif batch.micro_size == "plan" and (first := planned()) is not None:
        sizes.begin_with(first)


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
    eval_start = _eval_start(config, share if whole else 2 * share, eval_share)
    return Sizes(
        train=MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=start if whole else smallest),
        evaluation=MicroBatchSizes(eval_start, config.oom.clean_steps, grow=grows, smallest=eval_start if whole else 1),
        parts=None if parts == "auto" else parts,
        updates=[update.name for update in config.updates] or [""],
    )


def _load_evaluation(sizes: MicroBatchSizes, hint: dict[str, Any], saved: dict[str, Any] | None) -> None:
    """Continue from `hint`, else from the checkpoint's."""
    if _is_valid(hint, "eval_micro"):
        sizes.start = min(sizes.start, hint["eval_micro"]["start"])
        sizes.load_state_dict(hint["eval_micro"])
        return
    if _is_known(saved, "eval_micro"):
        sizes.load_state_dict(saved["eval_micro"])


def _eval_start(config: Config, most: int, eval_share: int) -> int:
    """Never more than this rank has: a size that is never reached is never proven."""
    size = config.batch.eval_micro_size
    return min(most if size == "auto" else size, eval_share)


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


def _is_known(source: dict[str, Any] | None, name: str) -> TypeGuard[dict[str, Any]]:
    """Whether a source has valid sizes, and of any shape."""
    return _is_valid(source, name) and bool(source[name]["buckets"])


def _is_valid(source: dict[str, Any] | None, name: str) -> TypeGuard[dict[str, Any]]:
    """Whether a source has valid sizes: it may be a damaged file."""
    try:
        if not source or not source[name]:
            return False
        MicroBatchSizes(1).load_state_dict(source[name])
        start = source[name]["start"]
        return type(start) is int and start >= 1
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
