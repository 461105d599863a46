"""A sweep from its command line to its exit status: what is asked for is checked and recorded, then the loop runs.

The same command continues a sweep, whatever has ended it.
"""

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from trainapp.config import command_line, excludes
from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.files import strict_json
from trainapp.launch import environment
from trainapp.launch.lock import locked
from trainapp.sweep import samplers
from trainapp.sweep.composing import Composer, read_settings
from trainapp.sweep.journal import Journal
from trainapp.sweep.loop import SweepLoop
from trainapp.sweep.space import Dimension, Space, parse

_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
# Settings of a sweep that do not choose its jobs.
_MAY_CHANGE = ("trials", "parallel", "pack", "max_time", "max_failures", "retry_failed", "storage")


def run(context: HydraContext, function: TaskFunction, composed: DictConfig, arguments: list[str]) -> None:
    """Start or continue the sweep of these overrides.

    Raises UserError for mistakes, and SystemExit with the status: 1 if jobs failed, 75 if it was interrupted and the
    same command continues it.
    """
    environment.require_one_process("multirun", "start `python -m trainapp -m ...` once: it starts its jobs itself")
    settings = read_settings(composed)
    space = parse(arguments, context.config_loader)
    composer = Composer(context.config_loader, composed, space)
    propose = samplers.build(settings, space)
    with locked(str(composer.folder)):
        journal = Journal(composer.folder)

        # Jobs see the time at which the sweep first began, also when it is continued.
        now = datetime.datetime.now().isoformat(timespec="seconds")
        started = journal.first_request.get("started", now)
        os.environ[environment.SWEEP_STARTED] = started
        environment.use_time_of_sweep()
        config = _accept(settings, composer, journal, _command(composed), started)

        # Hydra's default launcher would run jobs one by one in this process; the loop starts processes instead.
        launcher = None
        if composed.hydra.launcher._target_ != _BASIC_LAUNCHER:
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=function, config=composed
            )

        loop = SweepLoop(settings, composer, propose, journal, config, launcher)
        status = loop.run()
    if status:
        raise SystemExit(status)


def _command(composed: DictConfig) -> list[str]:
    """Return the arguments of the command line, without the sweep's directory."""
    by_kind: Any = OmegaConf.to_container(composed.hydra.overrides, resolve=False)
    skipped = ("hydra.sweep.dir=", "hydra.mode=", "sweep.retry_failed=")  # failed jobs are retried once
    arguments = [*command_line.flags(composed.hydra), "-m"]
    for override in (*by_kind["task"], *by_kind["hydra"]):
        if not override.startswith(skipped):
            arguments.append(override)
    return arguments


def _accept(settings: Sweep, composer: Composer, journal: Journal, command: list[str], started: str) -> Config:
    """Check what is asked for, and record it in the journal if it is new. Return the configuration of the first job.

    Raises UserError for another sweep than the journal's, and for jobs that could not start.
    """
    # Another sweep is refused before its jobs are checked, which takes a while.
    request = _request_of(settings, composer.space)
    is_new = journal.last_request.get("asked") != request
    is_continued = bool(journal.first_request)
    if is_continued:
        differences = _differences(journal.first_request["asked"], request)
        _require_same(differences, composer.folder)
    digests: dict[str, str] = {}
    if is_new:
        digests = _check_jobs(settings, composer, journal)

    # The first job stands for all of them, also where others run first.
    first_of_space = next(composer.space.covering())
    values = tuple(journal.first_request.get("values", first_of_space))
    config = composer.job(0, values).config
    if is_continued:
        _require_same(journal.config_changes(config), composer.folder)
    if settings.pruner != "none":
        _require_pausable(settings, config)
    _require_comparable(settings, config)

    if is_new or journal.last_request["command"] != command:
        journal.add(
            "asked" if is_continued else "sweep",
            asked=request,
            command=command,
            cwd=os.getcwd(),
            values=values,
            started=started,
            digests=digests,
            config=json.loads(strict_json(config.to_dict(), default=str)),
        )
    return config


def _check_jobs(settings: Sweep, composer: Composer, journal: Journal) -> dict[str, str]:
    """Check the jobs before any starts. Return the digests of a grid's jobs, by name.

    Raises UserError for jobs that could not start, and for trials whose configuration has changed.
    """
    number_by_values = {trial.values: trial.number for trial in journal.trials}
    digests = composer.check(number_by_values)
    if settings.sampler != "grid":
        return {}  # the jobs' numbers, on which their configurations may depend, are not known yet

    # Trials recorded with another configuration no longer belong to this sweep.
    if digests:
        changed = []
        for trial in journal.trials:
            name = " ".join(composer.space.swept_overrides(trial.values))
            if journal.digests.get(name) != digests[name]:
                changed.append(f"the configuration of {name}")
        _require_same(changed, composer.folder)
    return digests


def _require_pausable(settings: Sweep, config: Config) -> None:
    """Raise UserError for jobs that cannot be paused at an evaluation."""
    if not config.activity.trains or not config.checkpointing.save or config.every.eval is None:
        raise UserError(
            f"sweep.pruner={settings.pruner}: pauses runs at an evaluation and continues them from a checkpoint; it "
            "needs mode=train, every.eval and checkpointing.save=true"
        )


def _require_comparable(settings: Sweep, config: Config) -> None:
    """Raise UserError for settings that compare trials where no evaluation is better than another."""
    sampler_name = settings.sampler if isinstance(settings.sampler, str) else settings.sampler.target
    if sampler_name not in ("grid", "random"):
        excludes.require_best(config, f"sweep.sampler={sampler_name}")
    if settings.pruner != "none":
        excludes.require_best(config, f"sweep.pruner={settings.pruner}")
    if settings.storage is not None:
        excludes.require_best(config, f"sweep.storage={settings.storage}")


# Whether a command continues the sweep in its directory or is another one, which is refused there


def _request_of(settings: Sweep, space: Space) -> dict[str, Any]:
    """Return what a command asks for, as plain values: the settings and the space that decide which sweep it is."""
    deciding = {name: value for name, value in asdict(settings).items() if name not in _MAY_CHANGE}
    return deciding | space.to_dict()


def _differences(request_before: dict[str, Any], request_now: dict[str, Any]) -> list[str]:
    """Return what makes it another sweep. A grid may have grown."""
    before = _by_name(request_before)
    now = _by_name(request_now)

    # A grid that has grown counts as the same.
    if request_now["sampler"] == "grid":
        for name in before.keys() & now.keys():
            if _has_grown(before[name], now[name]):
                before[name] = now[name]

    texts = []
    for name in before | now:
        if before.get(name) == now.get(name):  # also null, and a setting that an earlier version did not have
            continue
        value_before = before.get(name, "not given")
        value_now = now.get(name, "not given")
        texts.append(f"{name}: {value_before} before, {value_now} now")

    # The order of swept settings matters: the last one varies fastest.
    if not texts and list(before) != list(now):
        texts.append(f"the order of {', '.join(before)}")
    return texts


def _by_name(request: dict[str, Any]) -> dict[str, Any]:
    """Return what was asked for, by name: the settings of the sweep, those of all jobs, and the swept ones."""
    values = {}
    for name, value in request.items():
        if name not in ("fixed", "dimensions"):
            values[f"sweep.{name}"] = value

    # Sort the settings of all jobs: their order does not matter.
    space = Space.from_dict(request)
    value_by_setting = {}
    for text in space.fixed:
        setting, _, setting_value = text.partition("=")
        value_by_setting[setting] = setting_value
    values |= dict(sorted(value_by_setting.items()))

    values |= {dimension.key: dimension for dimension in space.dimensions}
    return values


def _has_grown(before: Any, now: Any) -> bool:
    """Return whether both are swept settings and the later one has all values of the earlier."""
    are_swept = isinstance(before, Dimension) and isinstance(now, Dimension)
    return are_swept and set(before.values) <= set(now.values)


def _require_same(differences: Sequence[str], folder: Path) -> None:
    """Raise UserError if there are differences to the sweep in this directory."""
    if not differences:
        return
    lines = "\n".join(f"  {line}" for line in differences)
    may_change = ", ".join(f"sweep.{name}" for name in _MAY_CHANGE)
    raise UserError(
        f"hydra.sweep.dir={folder}: this directory belongs to another sweep, or its files have changed:\n{lines}\n"
        f"choose another directory, or change them back; a grid may get more values, and {may_change} may change"
    )
