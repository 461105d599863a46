"""The checkpoint that a run continues from: which one, and which of its settings apply."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pydantic
from pydantic import TypeAdapter

from trainapp.checkpoint import checkpointer
from trainapp.checkpoint.directory import CheckpointDirectory, resolve
from trainapp.checkpoint.manifest import read_manifest
from trainapp.config import resume_rules
from trainapp.config.schema import Config, Data, Target
from trainapp.errors import UserError
from trainapp.training.session import Session
from trainapp.units import listed

log = logging.getLogger(__name__)


def origin(config: Config, continues: bool) -> Path | None:
    """The checkpoint that a run continues from, on rank 0. None: the run begins with initial weights.

    continues: whether the run's own newest checkpoint comes before the one that `checkpointing.resume` names. Raises
    UserError for one that the run cannot continue from in its directory.
    """
    resume, trains = config.checkpointing.resume, config.activity.trains
    own = CheckpointDirectory(Path(config.run_dir))
    newest = own.newest() if continues or resume == "auto" else None
    if newest is not None or resume in ("auto", "none"):
        return newest
    path, run_dir = resolve(resume), Path(config.run_dir).resolve()
    if trains and own.newest_name() and not path.resolve().is_relative_to(run_dir):
        if (newest := own.newest()) is not None:
            began = read_manifest(newest)["config"]["checkpointing"]["resume"]
            if began == resume or Path(began).is_relative_to(config.run_dir):  # of a restart after an OOM
                return newest  # the same command again
        raise UserError(
            f"checkpointing.resume={resume} with hydra.run.dir={config.run_dir}: this directory has checkpoints of "
            "another run, which would be replaced; choose another directory, or checkpointing.resume=auto to continue "
            "the run in this one"
        )
    return path


def names_a_checkpoint(config: Config) -> bool:
    """Whether there seems to be one, which is not read: for a signal before it is."""
    resume = config.checkpointing.resume
    if resume == "auto":
        return CheckpointDirectory(Path(config.run_dir)).newest_name() is not None
    return resume != "none"


def as_saved(config: Config, path: Path) -> Config:
    """The configuration with the checkpoint's seed and way of drawing: another seed mid-epoch would repeat and omit
    samples. A checkpoint of an earlier version has torch's own draws.

    In modes other than train also with its `ema` and the parts that the command line does not choose. Raises UserError
    for another seed or way of drawing on the command line.
    """
    saved = {"draws": "device"} | read_manifest(path)["config"]["train"]
    if not config.activity.trains:
        config = _with_parts_of(config, path)
        _require_same_adapter(config, path)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, ema=saved["ema"]))
    for name in ("seed", "draws"):
        own = getattr(config.train, name)
        if config.activity.trains and saved[name] != own and config.chooses(f"train.{name}"):
            raise UserError(
                f"train.{name}={own}: the run in {path} has {name} {saved[name]}, on which its samples and steps "
                f"depend; omit train.{name}, or start a new run from its weights with model.init_from=RUN"
            )
    draws = config.train.draws if not config.activity.trains and config.chooses("train.draws") else saved["draws"]
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seed=saved["seed"], draws=draws))


# What a run's model is built from. Without `user_packages`: a foreign checkpoint must not choose what is imported.
BUILT_FROM = ("model", "data", "task", "task_arguments", "adapter", "optimizer", "updates", "precision")
_MADE_OF = (*BUILT_FROM, "eval", "metrics", "objective")
# Settings below `data` that configure loading, not the data set.
_LOADING = {own.name for own in dataclasses.fields(Data)} - {own.name for own in dataclasses.fields(Target)}


def _with_parts_of(config: Config, path: Path) -> Config:
    """The configuration, with the parts that the command line does not name taken from the checkpoint.

    Raises UserError for parts unknown to this version.
    """
    saved = read_manifest(path)["config"]
    taken = {name: saved[name] for name in _missing(config) if name in saved}
    if "data" in taken:
        own, values = taken["data"], dataclasses.asdict(config.data)
        for setting in _settings_of_data(config):
            names = setting.split(".")
            _change(own, values, names if names[0] in _LOADING else ["arguments", *names])
    if "task_arguments" in taken:
        for setting in config.given:
            if setting.startswith("task."):
                _change(taken["task_arguments"], config.task_arguments, setting.split(".")[1:])
    return saved_config(path, dataclasses.asdict(config) | taken)


def _require_same_adapter(config: Config, path: Path) -> None:
    """Raises UserError for adapters of other shapes than the run's: its weights would not fit, tensor by tensor."""
    saved = read_manifest(path)["config"].get("adapter") or {}
    for name in ("kind", "rank", "targets", "train"):
        own = getattr(config.adapter, name)
        if name in saved and saved[name] != own:
            raise UserError(
                f"adapter.{name}={own}: the run in {path} has adapter.{name}={saved[name]}, and mode={config.mode} "
                "uses its weights; leave out `adapter`, whose settings are then those of the run"
            )


def _settings_of_data(config: Config) -> list[str]:
    """Settings below `data` that the command line names."""
    return [name.removeprefix("data.") for name in config.given if name.startswith("data.")]


def saved_config(path: Path, values: dict[str, Any]) -> Config:
    """The configuration with these values from the checkpoint at `path`. Raises UserError if another version wrote
    them.
    """
    try:
        return TypeAdapter(Config).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"checkpoint {path}: this version does not accept its setting {'.'.join(map(str, first['loc']))}: "
            f"{first['msg']}"
        ) from None


def _missing(config: Config) -> list[str]:
    """The sections that the command line leaves to the checkpoint: a run's model may predict on other data. Single
    settings change the run's own data. An experiment chooses everything.
    """
    if config.chooses("experiment"):
        return []
    is_other_data = not {"data", "data._target_"}.isdisjoint(config.given)
    is_other_task = "task" in config.given
    chosen = {"data": is_other_data, "task": is_other_task, "task_arguments": is_other_task}
    if config.activity.writes_rows:
        chosen["metrics"] = True
        if config.mode == "generate" or config.predict.split in ("val", "train"):
            chosen["eval"] = True  # sets in `eval` are not opened
    elif is_other_data or any(setting.partition(".")[0] not in _LOADING for setting in _settings_of_data(config)):
        chosen["eval"] = True  # these sets belong to the run's own data
    return [name for name in _MADE_OF if not chosen.get(name, config.chooses(name))]


def _change(settings: dict[str, Any], source: dict[str, Any], path: list[str]) -> None:
    """Set the setting at `path` to its value in `source`; remove it if `source` has none."""
    name, *rest = path
    if rest and name in source:
        settings[name] = dict(settings.get(name) or {})
        _change(settings[name], source[name], rest)
    elif name in source:
        settings[name] = source[name]
    else:
        settings.pop(name, None)


def restore(session: Session, path: Path) -> dict[str, Any]:
    """Load the checkpoint at `path` into the run. Returns its micro-batch sizes and the memory `budget` they were found
    in. A checkpoint of an earlier version knows no draws.

    Raises UserError if the checkpoint does not fit the model, or if the run cannot continue from it.
    """
    saved = checkpointer.restore(session.state, path, session.ranks)
    progress = session.state.progress
    session.checkpointer.saved_at = session.checkpointer.committed_at = progress.step
    if session.objective.direction is None:  # an earlier version chose a best one nevertheless
        progress.best = progress.best_step = None
    verb = "loaded"
    if session.config.activity.trains:
        verb = "resumed from"
        _follow_settings(session, path)
        _follow_data(session, path, saved["sampler"])
        left = session.batches.steps_left(progress.consumed)
        if left is not None and left <= 0:  # another batch size or drop_last may leave nothing
            progress.begin_next_epoch()
        _require_steps_left(session, path)
        session.measure_length()  # data or global batch may have changed, now or before this checkpoint
    if "draws" in saved["sizes"]:
        session.engine.draw_record.load_state_dict(saved["sizes"]["draws"])
    log.info("%s %s: step %d, epoch %d, %d samples", verb, path, progress.step, progress.epoch, progress.samples)
    return saved["sizes"]


def _follow_settings(session: Session, path: Path) -> None:
    """Log the settings that differ from the checkpoint's. New settings of `stopping` or `callbacks` let a stopped run
    continue; with another objective, the best value so far is dropped.
    """
    changes = resume_rules.changes(read_manifest(path)["config"], session.config.to_dict())
    if not changes:
        return
    texts = (f"{change.name} {change.before} -> {change.now}" for change in changes)
    log.info("other settings than in the checkpoint: %s", listed(texts, most=8))
    progress, sections = session.state.progress, {change.name.partition(".")[0] for change in changes}
    if progress.stopped is not None and sections & {"stopping", "callbacks"}:
        log.info("the run had ended (%s); with these settings it continues", progress.stopped)
        progress.stopped = None
    defined = {change.name.split(".")[1] for change in changes if change.name.startswith(("eval.", "metrics."))}
    is_other = "objective" in sections or not defined.isdisjoint(session.objective.metric.split("/"))
    if is_other and progress.best is not None:
        log.info("the best %s so far (%.4g) no longer counts", session.objective.metric, progress.best)
        progress.objective = progress.best = progress.best_step = None


def _follow_data(session: Session, path: Path, before: dict[str, Any]) -> None:
    """Apply `data.on_change` if the data's length or order differs from the checkpoint's: its epoch cannot continue.

    before: the checkpoint's `samples` and `order`. Raises UserError for `refuse`.
    """
    progress, batches = session.state.progress, session.batches
    change = batches.source.misfit
    if before["order"] != batches.source.order_name:
        change = (
            f"the training data has a different order ({batches.source.order_name}) than when {path} was saved "
            f"({before['order']}): data.sampling has changed, or a stream has replaced a data set"
        )
    elif batches.samples != before["samples"]:
        change = f"the training data has {batches.samples} samples, but had {before['samples']} when {path} was saved"
    if change is None:
        return
    if session.config.data.on_change == "refuse":
        raise UserError(
            f"data.on_change=refuse: {change}: the run would repeat some samples and omit others, or change its "
            "length; restore the data, use data.on_change=next_epoch, or start a new run (checkpointing.resume=none)"
        )
    left = before["samples"] - progress.consumed if progress.consumed else 0
    if progress.consumed:
        progress.begin_next_epoch()
    log.warning(
        "%s: training continues with epoch %d%s (data.on_change=next_epoch)",
        change,
        progress.epoch,
        f", skipping {left} samples of the previous epoch" if left > 0 else "",
    )
    batches.begin_epoch(progress.epoch)


def _require_steps_left(session: Session, path: Path) -> None:
    """Raises UserError if the run would end before the checkpoint's step or, in a new directory, at it: its result
    would be that of the other run. A finished run that is restarted returns its own result.
    """
    train, progress = session.config.train, session.state.progress
    is_own = path.resolve().is_relative_to(Path(session.config.run_dir).resolve())
    begun = session.batches.epochs(progress)
    for name, end, reached in (("steps", train.max_steps, progress.step), ("epochs", train.max_epochs, begun)):
        if end is not None and (reached > end or (reached == end and not is_own)):
            raise UserError(
                f"train.max_{name}={end}: {path} has already trained {round(reached, 2):.10g} {name}, so none are "
                "left; set a later end to continue it, or start a new run from its weights in another directory with "
                "model.init_from=RUN"
            )
