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
from trainapp.config.schema import Config, Data, setting_names
from trainapp.errors import UserError
from trainapp.training.session import Session
from trainapp.units import listed

log = logging.getLogger(__name__)


def origin(config: Config, continues: bool) -> Path | None:
    """Return the checkpoint that a run continues from, on rank 0. None: the run begins with initial weights.

    Raises UserError for one that the run cannot continue from in its directory.

    Args:
        config: the run's configuration.
        continues: whether the newest checkpoint in the run's directory comes before the one that
            `checkpointing.resume` names.
    """
    # The run's own newest one.
    setting = config.checkpointing.resume
    directory = CheckpointDirectory(Path(config.run_dir))
    newest = None
    if continues or setting == "auto":
        newest = directory.newest()
    if newest is not None or setting in ("auto", "none"):
        return newest

    # The one that is named, in a directory without checkpoints of its own.
    path = resolve(setting)
    is_in_directory = path.resolve().is_relative_to(Path(config.run_dir).resolve())
    if not config.activity.trains or is_in_directory or not directory.newest_name():
        return path

    # Another run's checkpoint, in a directory that has some: allowed where the same command continues.
    newest = directory.newest()
    if newest is not None:
        began_from = read_manifest(newest)["config"]["checkpointing"]["resume"]
        is_restart_after_oom = Path(began_from).is_relative_to(config.run_dir)
        if began_from == setting or is_restart_after_oom:
            return newest
    raise UserError(
        f"checkpointing.resume={setting} with hydra.run.dir={config.run_dir}: this directory has checkpoints of "
        "another run, which would be replaced; choose another directory, or checkpointing.resume=auto to continue "
        "the run in this one"
    )


def names_a_checkpoint(config: Config) -> bool:
    """Return whether there seems to be a checkpoint, without reading it: for a signal before it is read."""
    setting = config.checkpointing.resume
    if setting == "auto":
        return CheckpointDirectory(Path(config.run_dir)).newest_name() is not None
    return setting != "none"


def as_saved(config: Config, path: Path) -> Config:
    """Return the configuration with the checkpoint's seed and way of drawing: another seed mid-epoch would repeat and
    omit samples. A checkpoint of an earlier version has torch's own draws.

    In modes other than train also with its `ema`, its global batch, on whose size a loss of the whole batch depends,
    and the sections that the command line does not choose. Raises UserError for another seed or way of drawing on the
    command line.
    """
    settings_of_run = read_manifest(path)["config"]
    saved = {"draws": "device"} | settings_of_run["train"]
    seed = saved["seed"]
    draws = saved["draws"]
    if config.activity.trains:
        _require_same_draws(config, saved, path)
        train = dataclasses.replace(config.train, seed=seed, draws=draws)
        return dataclasses.replace(config, train=train)

    config = _with_saved_sections(config, path)
    _require_same_adapter(config, path)
    if config.chooses("train.draws"):
        draws = config.train.draws
    train = dataclasses.replace(config.train, ema=saved["ema"], seed=seed, draws=draws)
    batch = config.batch
    if not config.chooses("batch.global_size"):
        batch = dataclasses.replace(batch, global_size=settings_of_run["batch"]["global_size"])
    return dataclasses.replace(config, train=train, batch=batch)


def _require_same_draws(config: Config, saved: dict[str, Any], path: Path) -> None:
    """Raise UserError if the command line names another seed or way of drawing than the checkpoint's."""
    for name in ("seed", "draws"):
        value = getattr(config.train, name)
        if saved[name] != value and config.chooses(f"train.{name}"):
            raise UserError(
                f"train.{name}={value}: the run in {path} has {name} {saved[name]}, on which its samples and steps "
                f"depend; omit train.{name}, or start a new run from its weights with model.init_from=RUN"
            )


# What a run's model is built from. Without `user_packages`: a foreign checkpoint must not choose what is imported.
BUILT_FROM = ("model", "data", "task", "task_arguments", "adapter", "optimizer", "updates", "precision")
_MADE_OF = (*BUILT_FROM, "eval", "metrics", "objective")
# Settings below `data` that configure loading, not the data set.
_LOADING = setting_names(Data)


def _with_saved_sections(config: Config, path: Path) -> Config:
    """Return the configuration, with the sections that the command line does not name taken from the checkpoint.

    Raises UserError for settings unknown to this version.
    """
    saved = read_manifest(path)["config"]
    sections = {name: saved[name] for name in _sections_left_to_checkpoint(config) if name in saved}

    # Single settings of the command line change the sections of the checkpoint.
    if "data" in sections:
        values = dataclasses.asdict(config.data)
        for setting in _settings_of_data(config):
            names = setting.split(".")
            if names[0] not in _LOADING:
                names = ["arguments", *names]
            _change(sections["data"], values, names)
    if "task_arguments" in sections:
        for setting in config.given:
            if setting.startswith("task."):
                names = setting.split(".")[1:]
                _change(sections["task_arguments"], config.task_arguments, names)

    values_of_all = dataclasses.asdict(config) | sections
    return saved_config(path, values_of_all)


def _require_same_adapter(config: Config, path: Path) -> None:
    """Raise UserError for adapters of other shapes than the run's: its weights would not fit, tensor by tensor."""
    saved = read_manifest(path)["config"].get("adapter") or {}
    for name in ("kind", "rank", "targets", "train"):
        value = getattr(config.adapter, name)
        if name in saved and saved[name] != value:
            raise UserError(
                f"adapter.{name}={value}: the run in {path} has adapter.{name}={saved[name]}, and mode={config.mode} "
                "uses its weights; leave out `adapter`, whose settings are then those of the run"
            )


def _settings_of_data(config: Config) -> list[str]:
    """Return the settings below `data` that the command line names."""
    return [name.removeprefix("data.") for name in config.given if name.startswith("data.")]


def saved_config(path: Path, values: dict[str, Any]) -> Config:
    """Return a configuration of these values from the checkpoint at `path`.

    Raises UserError if another version wrote them.
    """
    try:
        return TypeAdapter(Config).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(map(str, first["loc"]))
        raise UserError(
            f"checkpoint {path}: this version does not accept its setting {setting}: {first['msg']}"
        ) from None


def _sections_left_to_checkpoint(config: Config) -> list[str]:
    """Return the sections that the command line leaves to the checkpoint: a run's model may predict on other data.
    Single settings change the data of the run. An experiment chooses everything but the optimizer: without a step, none
    is used, and only the run's own can be loaded.
    """
    if config.chooses("experiment"):
        return ["optimizer"]
    is_other_data = not {"data", "data._target_"}.isdisjoint(config.given)
    is_other_task = not {"task", "task._target_"}.isdisjoint(config.given)
    is_chosen = {name: config.chooses(name) for name in _MADE_OF}
    is_chosen |= {"data": is_other_data, "task": is_other_task, "task_arguments": is_other_task, "optimizer": False}

    # Sections that go with what is done, or with the data.
    if config.activity.writes_rows:
        is_chosen["metrics"] = True
        if config.mode == "generate" or config.predict.split in ("val", "train"):
            is_chosen["eval"] = True  # sets in `eval` are not opened
    elif is_other_data or _changes_data(config):
        is_chosen["eval"] = True  # these sets belong to the data of the run

    return [name for name in _MADE_OF if not is_chosen[name]]


def _changes_data(config: Config) -> bool:
    """Return whether the command line changes the data set itself, not only how it is loaded."""
    return any(setting.partition(".")[0] not in _LOADING for setting in _settings_of_data(config))


def _change(settings: dict[str, Any], source: dict[str, Any], path: list[str]) -> None:
    """Set the setting at `path` to its value in `source`; remove it if `source` has none."""
    name, *names_below = path
    if names_below and name in source:
        settings[name] = dict(settings.get(name) or {})
        _change(settings[name], source[name], names_below)
    elif name in source:
        settings[name] = source[name]
    else:
        settings.pop(name, None)


def restore(session: Session, path: Path) -> dict[str, Any]:
    """Load the checkpoint at `path` into the run. Return its micro-batch sizes and the memory `budget` they were found
    in. A checkpoint of an earlier version knows no draws.

    Raises UserError if the checkpoint does not fit the model, or if the run cannot continue from it.
    """
    saved = checkpointer.restore(session.state, path, session.ranks)
    progress = session.state.progress
    session.checkpointer.saved_at = progress.step
    session.checkpointer.committed_at = progress.step
    if session.objective.direction is None:  # an earlier version chose a best one nevertheless
        progress.best = None
        progress.best_step = None

    # What has changed since then, in settings and data.
    verb = "loaded"
    if session.config.activity.trains:
        verb = "resumed from"
        _follow_settings(session, path)
        _follow_data(session, path, saved["sampler"])
        steps_left = session.batches.steps_left(progress.consumed)
        if steps_left is not None and steps_left <= 0:  # another batch size or drop_last may leave nothing
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
    texts = [f"{change.name} {change.before} -> {change.now}" for change in changes]
    log.info("other settings than in the checkpoint: %s", listed(texts, most=8))

    # What had ended the run may not end it with other settings.
    progress = session.state.progress
    sections = {change.name.partition(".")[0] for change in changes}
    if progress.stopped is not None and sections & {"stopping", "callbacks"}:
        log.info("the run had ended (%s); with these settings it continues", progress.stopped)
        progress.stopped = None

    # An objective such as `test/f1` depends on the definitions of the set `test` and of the metric `f1`.
    metric = session.objective.metric
    redefined = {change.name.split(".")[1] for change in changes if change.name.startswith(("eval.", "metrics."))}
    is_other_objective = "objective" in sections or not redefined.isdisjoint(metric.split("/"))
    if is_other_objective and progress.best is not None:
        log.info("the best %s so far (%.4g) no longer counts", metric, progress.best)
        progress.objective = None
        progress.best = None
        progress.best_step = None


def _follow_data(session: Session, path: Path, before: dict[str, Any]) -> None:
    """Apply `data.on_change` if the data's length or order differs from the checkpoint's: its epoch cannot continue.

    Raises UserError for `refuse`.

    Args:
        session: the live objects, with the restored progress.
        path: the checkpoint.
        before: the checkpoint's `samples` and `order`.
    """
    progress = session.state.progress
    batches = session.batches

    # What has changed, in words.
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
    # Leave the epoch that had begun, saying what it loses.
    skipped = ""
    if progress.consumed:
        samples_left = before["samples"] - progress.consumed
        if samples_left > 0:
            skipped = f", skipping {samples_left} samples of the previous epoch"
        progress.begin_next_epoch()
    log.warning("%s: training continues with epoch %d%s (data.on_change=next_epoch)", change, progress.epoch, skipped)
    batches.begin_epoch(progress.epoch)


def _require_steps_left(session: Session, path: Path) -> None:
    """Raise UserError if the run would end before the checkpoint's step or, in a new directory, at it: its result
    would be that of the other run. A finished run that is restarted returns its result again.
    """
    train = session.config.train
    progress = session.state.progress
    is_in_directory = path.resolve().is_relative_to(Path(session.config.run_dir).resolve())
    ends = [
        ("steps", train.max_steps, progress.step),
        ("epochs", train.max_epochs, session.batches.epochs(progress)),
    ]
    for name, end, trained in ends:
        if end is None or trained < end or (trained == end and is_in_directory):
            continue
        raise UserError(
            f"train.max_{name}={end}: {path} has already trained {round(trained, 2):.10g} {name}, so none are left; "
            "set a later end to continue it, or start a new run from its weights in another directory with "
            "model.init_from=RUN"
        )
