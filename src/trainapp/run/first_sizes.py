"""The micro-batch sizes that a run starts with."""

import sys
from collections.abc import Mapping
from typing import Any

from trainapp.config.schema import INFERENCE
from trainapp.losses.contrastive import require_uncut
from trainapp.losses.losses import needs_whole_batch
from trainapp.models.inspect import smallest_micro_batch
from trainapp.sizes.micro_batches import Autotuner, MicroBatchSizes, Plan
from trainapp.sizes.record import EVALUATION, Sizes, given_size, key_of
from trainapp.training.session import Session

Record = dict[str, Any]  # see `Sizes.state_dict`


def initial_sizes(session: Session, restart: Record | None = None, saved: Record | None = None) -> Sizes:
    """The sizes to start with. For training, the first of these that is known:

    1. `restart`: from workers that ran out of memory. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry for the coming attempt; its later entries override all the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, if found with the same memory budget.
    5. This rank's share of the global batch.

    For evaluation: `restart`, `batch.eval_micro_size=N`, `saved`, twice this rank's share.

    The record of `saved` is continued; `restart` may lack the sizes of some work. Raises UserError for settings that
    would split a batch that must stay whole.
    """
    config, world, progress = session.config, session.ranks.world, session.state.progress
    batch, restart, saved = config.batch, restart or {}, saved or {}
    found = saved if saved.get("budget") == session.memory.budget else {}
    whole = needs_whole_batch(session.task) and config.mode not in INFERENCE
    if whole and config.mode == "train":
        require_uncut(config, world, session.batches.samples)
    share, eval_share = -(-batch.global_size // world), -(-_samples_per_evaluation(session) // world)
    is_fixed = whole or batch.micro_schedule is not None or config.accumulation.steps != "auto"
    # Where a failing size costs a restart of all workers, not only a retried step, no larger size is tried.
    given, grows = given_size(config, share), session.retries_in_place and config.oom.grow and not is_fixed
    attempt = progress.step + progress.skipped + 1  # the coming one

    def new(start: int, smallest: int) -> MicroBatchSizes:
        return MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=start if whole else smallest)

    by_update = {}
    for name in [update.name for update in config.updates] or [""]:
        by_update[name] = own = new(given or share, smallest_micro_batch(session.state.model))
        own.used = dict(saved.get("used", {}).get(name, {}))
        own.schedule = _from_attempt(batch.schedules.get(name, {}), attempt, share)
        _begin(own, key_of(name), attempt, restart, found if given is None else {})
    # At most this rank's samples: a size that is never reached is never validated.
    most = batch.eval_micro_size if isinstance(batch.eval_micro_size, int) else share if whole else 2 * share
    evaluation = new(min(most, eval_share), 1)
    _begin(evaluation, EVALUATION, attempt, restart, found if batch.eval_micro_size == "auto" else {})
    # The checkpoint predates the latest errors, which `restart` counts.
    restarts = max(known.get("oom_restarts", 0) for known in (saved, restart))
    autotunes = session.state.device.type == "cuda" and not config.train.deterministic
    return Sizes(by_update, evaluation, Autotuner(autotunes), restarts)


def _samples_per_evaluation(session: Session) -> int:
    """Of the largest set, over all ranks: no limit if a set's length is unknown."""
    if session.config.mode == "generate":
        return len(session.config.generate.prompts)
    return max((own.samples or sys.maxsize for own in session.eval_sets.values()), default=1)


def _begin(own: MicroBatchSizes, key: str, attempt: int, restart: Record, found: Record) -> None:
    """Start from the first that is known: `restart`, the schedule, the checkpoint's sizes."""
    if key in restart:
        own.load_state_dict(restart[key], is_lower=True)
        own.schedule.pop(attempt, None)
    elif own.schedule:
        own.follow_schedule(attempt)
    elif key in found and found[key]["buckets"]:
        own.load_state_dict(found[key])


def _from_attempt(schedule: Mapping[int, Plan], attempt: int, share: int) -> dict[int, Plan]:
    """The rest of a schedule: the entry in force at `attempt`, and later ones. No size exceeds this rank's share."""
    rest: dict[int, Plan] = {}
    for entry, plan in sorted(schedule.items()):
        if isinstance(plan, int):
            rest[max(entry, attempt)] = min(plan, share)
        else:
            rest[max(entry, attempt)] = {bucket: min(size, share) for bucket, size in plan.items()}
    return rest
