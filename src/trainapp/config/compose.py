"""The typed configuration, made from what Hydra composes; all mistakes are reported at once. Imports no torch."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import pydantic
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from trainapp.config import command_line, excludes, mistakes, replaced_options
from trainapp.config.arguments import messages
from trainapp.config.claimed_settings import with_written_defaults
from trainapp.config.schema import Config, UpdateSettings
from trainapp.errors import UserError
from trainapp.files import CONF
from trainapp.units import listed

FILLED_IN = ("run_dir", "command", "given", "started", "task_arguments", "sweeper_direction")
# Hydra 1.3 asks which version's defaults are meant; 1.4 has one set of them, and warns if it is told.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
replaced_options.install()


def from_command_line(overrides: Iterable[str], run_dir: str = "", config_dir: str | Path | None = None) -> Config:
    """Return the configuration of `python -m trainapp OVERRIDES`, for notebooks, tests and benchmarks.

    config_dir: as `--config-dir`, a folder with your own options. Raises UserError with all mistakes.
    """
    hydra_overrides = command_line.for_hydra(as_overrides(overrides))

    # The user's folder: a flag of the shell command, and an override for Hydra's API, which has no flags.
    flags = []
    search_path = []
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            rule = "there is no such folder; name the one that holds your YAML files"
            raise UserError(f"config_dir={config_dir}: {rule}")
        flags.append(f"--config-dir={folder}")
        search_path.append(f"hydra.searchpath=[{command_line.quoted(str(folder))}]")

    try:
        with _without_callers_hydra(), initialize_config_dir(str(CONF), **VERSION_BASE):
            composed = compose("train", [*hydra_overrides, *search_path])
    except Exception as error:
        message = mistakes.explain(error, hydra_overrides)
        if message is None:
            raise
        raise UserError(message) from None

    entered = [command_line.as_entered(text) for text in hydra_overrides]
    command = command_line.command(flags + entered, run_dir)
    return from_hydra(composed, run_dir, command, entered)


@contextlib.contextmanager
def _without_callers_hydra() -> Iterator[None]:
    """Set Hydra's state aside: inside `@hydra.main`, ours or the user's, it refuses a second initialization."""
    global_hydra = GlobalHydra.instance()
    job_runtime = JobRuntime.instance()
    version = VersionBase.instance()
    callers_hydra = global_hydra.hydra
    callers_job_name = job_runtime.get("name")
    callers_version_base = version.version_base

    # A second initialization overwrites all three.
    global_hydra.clear()
    try:
        yield
    finally:
        global_hydra.hydra = callers_hydra
        GlobalHydra.set_instance(global_hydra)
        job_runtime.set("name", callers_job_name)
        version.version_base = callers_version_base


def as_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the overrides of a call from Python. Raises UserError for a string or a dict, the usual mistakes."""
    if isinstance(overrides, str | Mapping):
        rule = "must be a list of strings, such as ['model=gpt', 'batch.micro_size=4']"
        raise UserError(f"overrides={overrides!r}: {rule}")
    return list(overrides)


def from_hydra(composed: DictConfig, run_dir: str, command: str, overrides: Iterable[str] = ()) -> Config:
    """Return the typed configuration of one run. Raises UserError with all mistakes, one per line.

    Args:
        composed: what Hydra has composed.
        run_dir: see `Config`.
        command: see `Config`.
        overrides: the command line's.
    """
    try:
        plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        message = str(error).strip().splitlines()[0]  # the lines after it are about OmegaConf's objects
        if error.full_key:
            message = f"{error.full_key}: {message}"
        raise UserError(message) from None

    # Arguments of the task were composed apart: see `command_line.for_hydra`.
    overrides = [command_line.as_entered(text) for text in overrides]
    _require_no_empty_mapping(plain, overrides)
    if isinstance(plain.get("task"), dict):
        plain["task"] = _replaced_task(plain["task"], overrides)
    if any(text.startswith("task.") for text in overrides):
        task = plain.get("task")
        if not isinstance(task, dict):
            task = {"_target_": task}
        plain["task"] = _merged(task, plain.pop("task_arguments", {}))

    written = plain.pop(replaced_options.WRITTEN, [])
    settings = {_setting_of(text) for text in overrides}
    config = from_dict(plain, run_dir, command, sorted(settings))
    return with_written_defaults(config, written)


def _require_no_empty_mapping(plain: dict[str, Any], overrides: Iterable[str]) -> None:
    """Raise UserError for an override such as `callbacks={}`: Hydra merges it with what is there, to no effect."""
    for text in overrides:
        setting, _, value = text.partition("=")
        node: Any = plain
        for name in setting.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if value.replace(" ", "") == "{}" and isinstance(node, dict) and node:
            names = listed(f"~{setting}.{name}" for name in node)
            raise UserError(
                f"{text}: removes nothing, since Hydra adds the entries of a mapping to those of {setting}; "
                f"to remove entries, write {names}"
            )


def _replaced_task(task: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the task without the arguments of an earlier one that the last override of the whole task replaces."""
    texts = [text for text in overrides if text.startswith("task={")]
    if not texts:
        return task
    (override,) = OverridesParser.create().parse_overrides(texts[-1:])
    replacement = override.value()
    if not isinstance(replacement, dict) or "_target_" not in replacement:
        return task
    return {name: value for name, value in task.items() if name in replacement}


def _merged(node: Any, changes: Any) -> Any:
    """Return a node of plain containers, with changes at any depth of its mappings."""
    if not (isinstance(node, dict) and isinstance(changes, dict)):
        return changes
    merged = dict(node)
    for key, value in changes.items():
        merged[key] = _merged(node.get(key), value)
    return merged


def _setting_of(override: str) -> str:
    """Return the setting or section that an override sets: `eval.hard` of `data@eval.hard=digits`."""
    name = re.split(r"[=:]", override.lstrip("+~"), maxsplit=1)[0]
    return name.rpartition("@")[2]


def from_dict(plain: dict[str, Any], run_dir: str = "", command: str = "", given: Sequence[str] = ()) -> Config:
    """Return the same as `from_hydra`, from plain containers in the layout of conf/train.yaml."""
    errors = [f"{key}: no such setting" for key in FILLED_IN if key in plain]
    filled_in = {"run_dir": run_dir, "command": command, "given": [*given]}
    try:
        config = TypeAdapter(Config).validate_python(_in_sections(plain) | filled_in)
    except pydantic.ValidationError as error:
        for message in messages(error, "", _known_keys):
            errors.append(_as_written(message))

    # Conflicts are only checked between valid values.
    if not errors:
        errors = excludes.conflicts(config)
    if errors:
        raise UserError("\n".join(errors))
    return config


def _in_sections(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the values in the layout of `Config`: task names separated from their arguments, null hooks and evaluation
    sets dropped, and each update's optimizer merged over the common one.
    """
    sections = _with_task(plain)

    # `metrics.accuracy=null` on the command line removes one that a file adds.
    for group in ("metrics", "callbacks", "tracker", "eval"):
        nodes = plain.get(group) or {}
        if isinstance(nodes, dict):
            nodes = {name: node for name, node in nodes.items() if node is not None}
        sections[group] = nodes

    updates = plain.get("updates")
    common_optimizer = plain.get("optimizer")
    if isinstance(updates, list):
        sections["updates"] = [_with_optimizer(update, common_optimizer) for update in updates]
    return sections


def _with_task(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node in which a `task` that is a mapping is split into its name and arguments."""
    task = node.get("task")
    if not isinstance(task, dict) or "_target_" not in task:
        return dict(node)
    arguments = dict(task)
    name = arguments.pop("_target_")
    return node | {"task": name, "task_arguments": arguments}


def _with_optimizer(update: Any, common_optimizer: Any) -> Any:
    """Return an update whose optimizer starts from the common `optimizer`, unless it names a class itself."""
    if not isinstance(update, dict):
        return update
    optimizer = update.get("optimizer") or {}
    names_class = isinstance(optimizer, dict) and "_target_" in optimizer
    if isinstance(optimizer, dict) and isinstance(common_optimizer, dict) and not names_class:
        optimizer = common_optimizer | optimizer
    return _with_task(update) | {"optimizer": optimizer}


def _as_written(message: str) -> str:
    """Return a message with its setting named as the user writes it, or a note if it is one of an earlier version."""
    subject = message.partition(": ")[0]
    setting, _, value = subject.partition("=")
    note = mistakes.renamed(setting, value)
    if note is not None:
        return note
    return re.sub(r"^([\w.]+)\.target\b", r"\1._target_", message)


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """Return the settings of the section at a location, which is a path of names and, in `updates`, numbers."""
    section: Any = Config
    for part in location:
        if isinstance(part, int):  # `updates` is the only list of sections
            section = UpdateSettings
        else:
            types = {field.name: field.type for field in dataclasses.fields(section)}
            section = types[part]
    names = [field.name for field in dataclasses.fields(section)]
    return [name for name in names if name not in FILLED_IN]
