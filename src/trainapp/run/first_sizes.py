"""The micro-batch sizes that a run starts with."""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainapp.checkpoint.manifest import read_manifest
from trainapp.config import resume_rules
from trainapp.losses.contrastive import require_uncut
from trainapp.losses.losses import needs_whole_batch
from trainapp.models.inspect import per_sample_buffers, smallest_micro_batch
from trainapp.run.resume import BUILT_FROM
from trainapp.sizes.autotuner import Autotuner
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.sizes.record import EVALUATION, Sizes, configured_size, key_of, sizes_text
from trainapp.sizes.schedule import ScheduledSizes
from trainapp.sizes.search import RESERVE_OF_RANKS
from trainapp.techniques import catalogue
from trainapp.training.session import Session
from trainapp.units import bytes_text, listed

Record = dict[str, Any]  # see `Sizes.state_dict`
# The memory of a micro-batch depends on what is computed, and on the techniques that save memory ...
_DETERMINE_MEMORY = (*BUILT_FROM, *catalogue.SETTINGS, "train.compile", "train.deterministic")
# ... but not on these of their settings.
_WITHOUT_MEMORY = (
    *("data.num_workers", "data.drop_last", "data.on_change", "data.on_error", "data.sampling.weights"),
    *("model.init_from", "model.init_strict", "model.init_prefix", "optimizer.lr", "optimizer.weight_decay"),
    *("precision.initial_scale", "precision.growth_interval"),
    *("parallel.devices", "parallel.max_restarts", "parallel.timeout", "parallel.vote_on_oom"),
)
log = logging.getLogger(__name__)


class Changes(NamedTuple):
    """What determines the memory of a micro-batch and has changed since a checkpoint was saved."""

    texts: list[str]  # in words
    bytes_less: int  # by how many the memory limit is lower, if nothing else has changed


def determines_memory(setting: str) -> bool:
    """Return whether the memory of a micro-batch depends on a setting, named as users write it."""
    return resume_rules.is_within(setting, _DETERMINE_MEMORY) and not setting.endswith(_WITHOUT_MEMORY)


def changes_of_memory(session: Session, path: Path) -> list[str]:
    """Return what determines the memory of a micro-batch, except for the limit, and has changed since the checkpoint at
    `path` was saved, in words: the sizes that fitted then say nothing of those that fit now.
    """
    manifest = read_manifest(path)
    world_size = session.ranks.world_size
    texts = []
    for change in resume_rules.changes(manifest["config"], session.config.to_dict()):
        if determines_memory(change.name):
            texts.append(str(change))
    if session.config.parallel.strategy == "fsdp" and manifest["ranks"] != world_size:  # with other shards
        texts.append(f"ranks: {manifest['ranks']} before, {world_size} now")
    return texts


def initial_sizes(
    session: Session, restart: Record | None = None, saved: Record | None = None, changed: Sequence[str] = ()
) -> Sizes:
    """Return the sizes to start with. For training, the first of these that is known:

    1. `restart`: from workers that ran out of memory. The size that it replaces has just failed.
    2. `batch.micro_schedule`: the entry for the coming attempt; its later entries override all the others.
    3. `batch.micro_size=N` or `accumulation.steps=N`.
    4. `saved`: the checkpoint's, without `changed` (see `changes_of_memory`); if the budget was larger, by its peaks.
    5. This rank's share of the global batch.

    For evaluation: `restart`, `batch.eval_micro_size=N`, `saved`, twice this rank's share, or its share where a module
    declares `per_sample_buffers`.

    The record of `saved` is continued; `restart` may lack the sizes of some work. Raises UserError for settings that
    would split a batch that must stay whole.
    """
    config = session.config
    batch = config.batch
    progress = session.state.progress
    restart = restart or {}
    saved = saved or {}
    changes = _with_change_of_budget(changed, saved, session.memory.budget)
    must_stay_whole = needs_whole_batch(session.task) and not config.activity.writes_rows
    if must_stay_whole and config.activity.trains:
        require_uncut(config, session.ranks.world_size, session.batches.samples)
    share = _share(batch.global_size, session)
    configured = configured_size(config, share)
    batch_number = progress.step + progress.skipped + 1  # the coming one

    # Training, by update.
    begins_anew = False
    by_update = {}
    saved_for_training = saved if configured is None else {}
    for name in [update.name for update in config.updates] or [""]:
        smallest = smallest_micro_batch(session.state.model)
        sizes = _new_sizes(session, configured or share, smallest, must_stay_whole)
        sizes.schedule.recorded = dict(saved.get("used", {}).get(name, {}))
        sizes.schedule.coming = _from_batch(batch.schedules.get(name, {}), batch_number, share)
        begins_anew |= _begin(sizes, key_of(name), batch_number, restart, saved_for_training, changes)
        by_update[name] = sizes

    # Evaluation, which has no schedule.
    evaluation = _new_sizes(session, _size_of_evaluation(session, must_stay_whole), 1, must_stay_whole)
    saved_for_evaluation = saved if batch.eval_micro_size == "auto" else {}
    begins_anew |= _begin(evaluation, EVALUATION, batch_number, restart, saved_for_evaluation, changes)
    if begins_anew:
        log.info(
            "searching the micro-batch size from scratch, since this has changed since the checkpoint: %s",
            listed(changes.texts),
        )
    return Sizes(by_update, evaluation, _autotuner(session), *_recoveries_before(saved, restart))


def _new_sizes(session: Session, start: int, smallest: int, must_stay_whole: bool) -> MicroBatchSizes:
    """Return sizes that begin with `start`."""
    config = session.config
    is_fixed = must_stay_whole or config.batch.micro_schedule is not None or config.accumulation.steps != "auto"
    # Where a failing size costs a restart of all workers, not only a retried step, no larger size is tried.
    grows = session.retries_in_place and config.oom.grow and not is_fixed
    if must_stay_whole:
        smallest = start
    reserve = RESERVE_OF_RANKS if session.ranks.world_size > 1 else 0.0
    return MicroBatchSizes(start, config.oom.clean_steps, grow=grows, smallest=smallest, reserve=reserve)


def _autotuner(session: Session) -> Autotuner | None:
    """Return an autotuner of kernels, if the device has several and the run need not be deterministic."""
    if session.state.device.type != "cuda" or session.config.train.deterministic:
        return None
    return Autotuner()


def _recoveries_before(saved: Record, restart: Record) -> tuple[int, int]:
    """Return the numbers of recoveries from out-of-memory errors and of all recoveries so far.

    The checkpoint predates the latest errors, which `restart` counts. Earlier versions wrote only `oom_restarts`.
    """
    oom_restarts = max(record.get("oom_restarts", 0) for record in (saved, restart))
    recoveries = max(record.get("recoveries", 0) for record in (saved, restart))
    return oom_restarts, max(oom_restarts, recoveries)


def _size_of_evaluation(session: Session, must_stay_whole: bool) -> int:
    """Return the configured or otherwise the first size of evaluations; see `initial_sizes`."""
    share = _share(session.config.batch.global_size, session)
    size = session.config.batch.eval_micro_size
    if not isinstance(size, int):
        size = share
        if not must_stay_whole and not _has_per_sample_buffers(session):
            size = 2 * share  # without gradients, a sample takes less memory than in training

    # At most this rank's samples: a size that is never reached is never validated.
    return min(size, _share(_samples_per_evaluation(session), session))


def _share(samples: int, session: Session) -> int:
    """Return this rank's share of the samples, rounded up."""
    return -(-samples // session.ranks.world_size)


def _has_per_sample_buffers(session: Session) -> bool:
    """Return whether a module has buffers with a row per sample: as many rows as training has samples."""
    modules = {"model": session.state.model, **session.state.stateful.modules}
    return bool(per_sample_buffers(modules))


def _samples_per_evaluation(session: Session) -> int:
    """Return the samples of the largest set, over all ranks: no limit if a set's length is unknown."""
    if session.config.mode == "generate":
        return len(session.config.generate.prompts)
    numbers = [batches.samples or sys.maxsize for batches in session.eval_sets.values()]
    return max(numbers, default=1)


def _with_change_of_budget(changed: Sequence[str], saved: Record, budget: int) -> Changes:
    before = saved.get("budget", budget)
    if before == budget:
        return Changes([*changed], 0)
    text = f"memory limit: {bytes_text(before)} before, {bytes_text(budget)} now"
    return Changes([text, *changed], 0 if changed else before - budget)


def _begin(
    sizes: MicroBatchSizes, key: str, batch_number: int, restart: Record, saved: Record, changes: Changes
) -> bool:
    """Start from the first that is known: `restart`, the schedule, the checkpoint's sizes unless anything has changed.
    If that is only the memory limit, and it is lower, from the size that fits by the checkpoint's peaks.

    Return whether the checkpoint's, smaller ones, are left out: larger sizes are tried than those that have fitted.
    """
    buckets = saved[key]["buckets"] if key in saved else {}
    if key in restart:
        sizes.load_state_dict(restart[key], is_lower=True)
        sizes.schedule.coming.pop(batch_number, None)
    elif sizes.schedule.coming:
        sizes.apply_schedule(batch_number)
    elif buckets and not changes.texts:
        sizes.load_state_dict(saved[key])
    elif buckets and changes.bytes_less > 0 and sizes.begin_below(saved[key], changes.bytes_less):
        log.info(
            "%s begins with micro-batch %s, which fits by the peaks measured before, since this has changed since the "
            "checkpoint: %s",
            "the evaluation" if key == EVALUATION else "training",
            sizes_text(sizes),
            listed(changes.texts),
        )
    else:
        return any(size < sizes.size for size, *_ in buckets.values())
    return False


def _from_batch(schedule: Mapping[int, ScheduledSizes], batch_number: int, share: int) -> dict[int, ScheduledSizes]:
    """Return the entry in force at that attempt and the later ones. No size exceeds this rank's share."""
    coming: dict[int, ScheduledSizes] = {}
    for first_batch, sizes in sorted(schedule.items()):
        if isinstance(sizes, int):
            at_most_share: ScheduledSizes = min(sizes, share)
        else:
            at_most_share = {bucket: min(size, share) for bucket, size in sizes.items()}
        # Earlier entries share a key, so that the last of them remains: the one in force.
        coming[max(first_batch, batch_number)] = at_most_share
    return coming
