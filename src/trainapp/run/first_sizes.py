"""The micro-batch sizes that a run starts with."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainapp.checkpoint.manifest import read_manifest
from trainapp.config import resume_rules
from trainapp.losses.contrastive import require_uncut
from trainapp.losses.losses import needs_whole_batch
from trainapp.models.inspect import per_sample_buffers, smallest_micro_batch
from trainapp.run.resume import BUILT_FROM
from trainapp.sizes.autotuner import Autotuner
from trainapp.sizes.micro_batches import MicroBatchSizes, ScheduledSizes
from trainapp.sizes.record import EVALUATION, Sizes, configured_size, key_of
from trainapp.techniques import catalogue
from trainapp.training.session import Session
from trainapp.units import bytes_text, listed

Record = dict[str, Any]  # see `Sizes.state_dict`
# The memory of a micro-batch depends on what is computed, and on the techniques that save memory ...
_DETERMINE_MEMORY = (*BUILT_FROM, *catalogue.SETTINGS, "train.compile", "train.deterministic")
# ... but not on these of their settings.
_WITHOUT_MEMORY = (
    *("data.num_workers", "data.drop_last", "data.on_change", "data.on_error", "data.sampling.weights"),
    *("model.init_from", "model.init_strict", "optimizer.lr", "optimizer.weight_decay"),
    *("precision.initial_scale", "precision.growth_interval"),
    *("parallel.devices", "parallel.max_restarts", "parallel.timeout", "parallel.vote_on_oom"),
)
log = logging.getLogger(__name__)


def determines_memory(setting: str) -> bool:
    """Whether the memory of a micro-batch depends on a setting, named as users write it."""
    return resume_rules.is_within(setting, _DETERMINE_MEMORY) and not setting.endswith(_WITHOUT_MEMORY)


def changes_of_memory(session: Session, path: Path) -> list[str]:
    """Return what determines the memory of a micro-batch, except for the limit, and has changed since the checkpoint at
    `path` was saved, in words: the sizes that fitted then say nothing of those that fit now.
    """
    manifest, world_size = read_manifest(path), session.ranks.world_size
    changes = resume_rules.changes(manifest["config"], session.config.to_dict())
    texts = [str(change) for change in changes if determines_memory(change.name)]
    if session.config.parallel.strategy == "fsdp" and manifest["ranks"] != world_size:  # with other shards
        texts.append(f"ranks: {manifest['ranks']} before, {world_size} now")
    return texts


def initial_sizes(
    session: Session, restart: Record | None = None, saved: Record | None = None, changed: Sequence[str] = ()
) -> Sizes:
    """The sizes to start with. For training, the first of these that is known:

    1. `restart`: from workers that ran out of memory. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry for the coming attempt; its later entries override all the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, if found with the same memory budget and without `changed`, see `changes_of_memory`.
    5. This rank's share of the global batch.

    For evaluation: `restart`, `batch.eval_micro_size=N`, `saved`, twice this rank's share, or its share where a module
    declares `per_sample_buffers`.

    The record of `saved` is continued; `restart` may lack the sizes of some work. Raises UserError for settings that
    would split a batch that must stay whole.
    """
    config, world_size, progress = session.config, session.ranks.world_size, session.state.progress
    batch, restart, saved = config.batch, restart or {}, saved or {}
    changed = [*_change_of_budget(saved, session.memory.budget), *changed]
    whole = needs_whole_batch(session.task) and not config.activity.writes_rows
    if whole and config.activity.trains:
        require_uncut(config, world_size, session.batches.samples)
    share, eval_share = -(-batch.global_size // world_size), -(-_samples_per_evaluation(session) // world_size)
    is_fixed = whole or batch.micro_schedule is not None or config.accumulation.steps != "auto"
    # Where a failing size costs a restart of all workers, not only a retried step, no larger size is tried.
    given, grows = configured_size(config, share), session.retries_in_place and config.oom.grow and not is_fixed
    attempt_number = progress.step + progress.skipped + 1  # the coming one

    def new(start: int, smallest: int) -> MicroBatchSizes:
        return MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=start if whole else smallest)

    by_update, is_anew = {}, False
    for name in [update.name for update in config.updates] or [""]:
        by_update[name] = own = new(given or share, smallest_micro_batch(session.state.model))
        own.sizes_by_attempt = dict(saved.get("used", {}).get(name, {}))
        own.schedule = _from_attempt(batch.schedules.get(name, {}), attempt_number, share)
        is_anew |= _begin(own, key_of(name), attempt_number, restart, saved if given is None else {}, changed)
    most = batch.eval_micro_size
    if not isinstance(most, int):
        modules = {"model": session.state.model, **session.state.stateful.modules}
        has_rows = bool(per_sample_buffers(modules))  # as many as training has samples
        most = share if whole or has_rows else 2 * share
    # At most this rank's samples: a size that is never reached is never validated.
    evaluation = new(min(most, eval_share), 1)
    saved_for_evaluation = saved if batch.eval_micro_size == "auto" else {}
    is_anew |= _begin(evaluation, EVALUATION, attempt_number, restart, saved_for_evaluation, changed)
    if is_anew:
        log.info(
            "searching the micro-batch size from scratch, since this has changed since the checkpoint: %s",
            listed(changed),
        )
    # The checkpoint predates the latest errors, which `restart` counts. Earlier versions wrote only `oom_restarts`.
    oom_restarts = max(record.get("oom_restarts", 0) for record in (saved, restart))
    recoveries = max(record.get("recoveries", 0) for record in (saved, restart))
    autotunes = session.state.device.type == "cuda" and not config.train.deterministic
    return Sizes(by_update, evaluation, Autotuner(autotunes), oom_restarts, max(oom_restarts, recoveries))


def _samples_per_evaluation(session: Session) -> int:
    """Of the largest set, over all ranks: no limit if a set's length is unknown."""
    if session.config.mode == "generate":
        return len(session.config.generate.prompts)
    return max((own.samples or sys.maxsize for own in session.eval_sets.values()), default=1)


def _change_of_budget(saved: Record, budget: int) -> list[str]:
    before = saved.get("budget", budget)
    return [] if before == budget else [f"memory limit: {bytes_text(before)} before, {bytes_text(budget)} now"]


def _begin(
    own: MicroBatchSizes, key: str, attempt_number: int, restart: Record, saved: Record, changed: Sequence[str]
) -> bool:
    """Start from the first that is known: `restart`, the schedule, the checkpoint's sizes unless anything `changed`.

    Returns whether the checkpoint's, smaller ones, are left out: larger sizes are tried than those that have fitted.
    """
    buckets = saved[key]["buckets"] if key in saved else {}
    if key in restart:
        own.load_state_dict(restart[key], is_lower=True)
        own.schedule.pop(attempt_number, None)
    elif own.schedule:
        own.apply_schedule(attempt_number)
    elif buckets and not changed:
        own.load_state_dict(saved[key])
    else:
        return any(size < own.size for size, *_ in buckets.values())
    return False


def _from_attempt(schedule: Mapping[int, ScheduledSizes], attempt_number: int, share: int) -> dict[int, ScheduledSizes]:
    """Return the entry in force at that attempt and the later ones. No size exceeds this rank's share."""
    rest: dict[int, ScheduledSizes] = {}
    for entry, plan in sorted(schedule.items()):
        if isinstance(plan, int):
            rest[max(entry, attempt_number)] = min(plan, share)
        else:
            rest[max(entry, attempt_number)] = {bucket: min(size, share) for bucket, size in plan.items()}
    return rest
