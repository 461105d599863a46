"""The checkpoint that a run continues from: which one, and what of it counts."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pydantic
from pydantic import TypeAdapter

from trainapp.checkpoint import checkpointer
from trainapp.checkpoint.directory import CheckpointDirectory, resolve
from trainapp.checkpoint.manifest import read_manifest
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.parallel.rank_zero import answered_by_rank_zero
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.run import changed_data
from trainapp.train.run import Run

log = logging.getLogger(__name__)


def agreed_checkpoint(config: Config, ranks: Ranks, has_restarted: bool) -> Path | None:
    """Rank 0 looks for the checkpoint. Collective; raises UserError on all ranks."""
    return answered_by_rank_zero(ranks, lambda: _checkpoint_to_resume(config, has_restarted))


def _checkpoint_to_resume(config: Config, has_restarted: bool) -> Path | None:
    """The requested checkpoint, else the newest one in the run directory."""
    resume = config.checkpointing.resume
    own = CheckpointDirectory(Path(config.run_dir), 1, SingleRank())
    if has_restarted and own.newest_name():
        return own.newest()
    if resume not in ("auto", "none"):
        return resolve(resume)
    return own.newest() if resume == "auto" else None


def as_saved(config: Config, path: Path) -> Config:
    """The configuration with the checkpoint's seed: another seed mid-epoch would repeat and omit samples.

    With mode=eval or export also its `ema`: a run with a weight average was evaluated on the average; and what the run
    is made of, where the command line chooses none of it.
    """
    if config.mode != "train":
        config = _with_parts_of(config, path)
    saved = read_manifest(path)["config"]["train"]
    if saved["seed"] != config.train.seed:
        log.warning("train.seed=%d: the resumed run has seed %d and keeps it", config.train.seed, saved["seed"])
    changes: dict[str, Any] = {"seed": saved["seed"]}
    if config.mode != "train":
        changes["ema"] = saved["ema"]
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


# The sections that say that a command line chooses for itself, and what a run is made of. Not `user_packages`: a
# checkpoint from elsewhere would otherwise decide which code is imported.
_CHOICES = ("model", "data", "task", "experiment")
_MADE_OF = ("model", "data", "loader", "task", "adapter", "optimizer", "precision", "objective")


def _with_parts_of(config: Config, path: Path) -> Config:
    """The configuration with the parts of the checkpoint's own that the command line does not name.

    Raises UserError for parts that this version does not know.
    """
    if any(name in config.given for name in _CHOICES):
        return config
    saved = read_manifest(path)["config"]
    taken = {name: saved[name] for name in _MADE_OF if name in saved and name not in config.given}
    try:
        return TypeAdapter(Config).validate_python(dataclasses.asdict(config) | taken)
    except pydantic.ValidationError as error:
        raise UserError(
            f"checkpoint {path}: its configuration is not one of this version's ({error.errors()[0]['loc']}: "
            f"{error.errors()[0]['msg']}); name its model and data, as in model=... data=..."
        ) from None


def restore(run: Run, path: Path) -> dict[str, Any]:
    """Fill the run from the checkpoint at `path`. Returns the micro-batch sizes in it, the `budget` of memory that they
    were found in, and under `not_replayed` what keeps a schedule of sizes from replaying the run.

    Raises UserError when the checkpoint does not fit the model.
    """
    sizes = checkpointer.restore(run.state, path, run.ranks)
    if not run.config.oom.keep_global_batch and sizes["global"] < run.state.global_size:
        run.set_global_size(sizes["global"])
    sizes["not_replayed"] = [*sizes.get("not_replayed", ()), *_changed(run, path, sizes)]
    progress = run.state.progress
    run.checkpointer.saved_at = progress.step
    changed_data.follow(run, path)
    if run.batches.steps_left(progress.consumed) <= 0:  # another batch size or drop_last may leave nothing
        progress.begin_next_epoch()
    if run.config.mode == "train":
        run.measure_length()  # data or global batch may have changed, now or before this checkpoint
    log.info("resumed from %s: step %d, epoch %d, %d samples", path, progress.step, progress.epoch, progress.samples)
    return sizes


def _changed(run: Run, path: Path, sizes: dict[str, Any]) -> list[str]:
    """What changes with this checkpoint and is not in the schedule of sizes. Evaluation and export replay nothing."""
    if run.config.mode != "train":
        return []
    step, ranks, world = run.state.progress.step, read_manifest(path)["ranks"], run.ranks.world
    changes = (
        ("ranks", ranks, world),
        ("batch.global_size", sizes["global"], run.state.global_size),
        ("training samples", run.state.data_samples, run.batches.samples),
        *_settings_changed(read_manifest(path)["config"], run.config),
    )
    return [f"{name}: {now} after step {step}, {before} until then" for name, before, now in changes if now != before]


# What decides the bits of a step beside the sizes; the length of the run decides its learning rates.
_WHOLE = ("data", "model", "optimizer", "task", "precision", "schedule", "adapter")
_PARTS = {
    "train": ("grad_clip", "ema", "nonfinite", "compile", "deterministic", "device"),
    "memory": ("loss_chunk",),
    "parallel": ("strategy",),
}


def _settings_changed(saved: dict[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """`(name, before, now)` of sections and settings. The values of whole sections are left out."""
    now = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    changed = [(name, "others", "its settings") for name in _WHOLE if saved.get(name) != now[name]]
    parts = {section: [*names] for section, names in _PARTS.items()}
    if config.schedule.shape != "constant":
        parts["train"] += ["max_steps", "max_epochs"]
    for section, names in parts.items():
        before = saved.get(section, {})
        changed += [
            (f"{section}.{n}", before.get(n), now[section][n]) for n in names if before.get(n) != now[section][n]
        ]
    return changed
