"""Turns Hydra's composed configuration into the typed one and reports all mistakes at once. Imports no torch."""

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
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from trainapp.config import command_line, excludes, mistakes, replaced_options
from trainapp.config.schema import Config, Update
from trainapp.config.targets import messages
from trainapp.errors import UserError
from trainapp.files import CONF

FILLED_IN = ("run_dir", "command", "given", "started", "task_arguments", "sweeper_direction")
# Hydra 1.3 asks which version's defaults are meant; 1.4 has one set of them, and warns if it is told.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
replaced_options.install()


def from_command_line(overrides: Iterable[str], run_dir: str = "", config_dir: str | Path | None = None) -> Config:
    """The configuration of `python -m trainapp OVERRIDES`, for notebooks, tests and benchmarks.

    config_dir: as `--config-dir`, a folder with your own options. Raises UserError with all mistakes.
    """
    given = command_line.for_hydra(as_overrides(overrides))
    folders = [] if config_dir is None else [Path(config_dir).expanduser().resolve()]
    if not all(map(Path.is_dir, folders)):
        raise UserError(f"config_dir={config_dir}: there is no such folder; name the one that holds your YAML files")
    search_path = [f"hydra.searchpath=[{command_line.quoted(str(folder))}]" for folder in folders]
    try:
        with _without_callers_hydra(), initialize_config_dir(str(CONF), **VERSION_BASE):
            composed = compose("train", [*given, *search_path])
    except Exception as error:
        message = mistakes.explain(error, given)
        if message is None:
            raise
        raise UserError(message) from None
    given = [command_line.as_entered(text) for text in given]
    command = command_line.command([*(f"--config-dir={folder}" for folder in folders), *given], run_dir)
    return from_hydra(composed, run_dir, command, given)


@contextlib.contextmanager
def _without_callers_hydra() -> Iterator[None]:
    """Set Hydra's state aside: inside `@hydra.main`, ours or the user's, it refuses a second initialization."""
    main, runtime, version = GlobalHydra.instance(), JobRuntime.instance(), VersionBase.instance()
    hydra, name, base = main.hydra, runtime.get("name"), version.version_base
    main.clear()
    try:
        yield
    finally:
        main.hydra = hydra
        GlobalHydra.set_instance(main)
        runtime.set("name", name)
        version.version_base = base


def as_overrides(given: Iterable[str]) -> list[str]:
    """The overrides of a call from Python. Raises UserError for a string or a dict, the usual mistakes."""
    if isinstance(given, str | Mapping):
        raise UserError(f"overrides={given!r}: must be a list of strings, such as ['model=gpt', 'batch.micro_size=4']")
    return list(given)


def from_hydra(composed: DictConfig, run_dir: str, command: str, overrides: Iterable[str] = ()) -> Config:
    """The typed configuration of one run. overrides: the command line's. Raises UserError with all mistakes, one per
    line.
    """
    try:
        plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except OmegaConfBaseException as error:
        setting = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{setting}{str(error).strip().splitlines()[0]}") from None
    overrides = [command_line.as_entered(text) for text in overrides]
    if any(text.startswith("task.") for text in overrides):
        task = plain.get("task")
        named = task if isinstance(task, dict) else {"_target_": task}
        plain["task"] = _merged(named, plain.pop("task_arguments", {}))
    # For `data@eval.hard=digits`, the section that it sets.
    given = {re.split(r"[=:]", text.lstrip("+~"), maxsplit=1)[0].rpartition("@")[2] for text in overrides}
    return from_dict(plain, run_dir, command, sorted(given))


def from_dict(plain: dict[str, Any], run_dir: str = "", command: str = "", given: Sequence[str] = ()) -> Config:
    """As `from_hydra`, from plain containers in the layout of conf/train.yaml."""
    errors = [f"{key}: no such setting" for key in FILLED_IN if key in plain]
    filled_in = {"run_dir": run_dir, "command": command, "given": [*given]}
    try:
        config = TypeAdapter(Config).validate_python(_in_sections(plain) | filled_in)
    except pydantic.ValidationError as error:
        errors += [_as_written(line) for line in messages(error, "", _known_keys)]
    if not errors:
        errors = excludes.conflicts(config)
    if errors:
        raise UserError("\n".join(errors))
    return config


def _in_sections(plain: dict[str, Any]) -> dict[str, Any]:
    """The values in the layout of `Config`: task names separated from their arguments, null hooks and evaluation sets
    dropped, and each update's optimizer merged over the common one.
    """
    sections = _with_task(plain)
    for group in ("metrics", "callbacks", "tracker", "eval"):
        nodes = plain.get(group) or {}
        sections[group] = {k: v for k, v in nodes.items() if v is not None} if isinstance(nodes, dict) else nodes
    if isinstance(plain.get("updates"), list):
        sections["updates"] = [_with_optimizer(update, plain.get("optimizer")) for update in plain["updates"]]
    return sections


def _with_task(node: dict[str, Any]) -> dict[str, Any]:
    """Splits the `task` of a node, if it is a mapping, into its name and arguments."""
    task = node.get("task")
    if not isinstance(task, dict) or "_target_" not in task:
        return dict(node)
    arguments = {key: value for key, value in task.items() if key != "_target_"}
    return node | {"task": task["_target_"], "task_arguments": arguments}


def _merged(node: Any, changes: Any) -> Any:
    """A node of plain containers, with changes at any depth of its mappings."""
    if not (isinstance(node, dict) and isinstance(changes, dict)):
        return changes
    return node | {key: _merged(node.get(key), value) for key, value in changes.items()}


def _with_optimizer(update: Any, common: Any) -> Any:
    """An entry of `updates`: its optimizer starts from the common `optimizer`, unless it names its own class."""
    if not isinstance(update, dict):
        return update
    own = update.get("optimizer") or {}
    if isinstance(own, dict) and "_target_" not in own and isinstance(common, dict):
        own = common | own
    return _with_task(update) | {"optimizer": own}


def _as_written(line: str) -> str:
    """The message, with settings named as the user writes them, and a note on settings of earlier versions."""
    setting, value = re.split(r"[=:]", line.partition(": ")[0] + "=", maxsplit=2)[:2]
    return mistakes.renamed(setting, value) or re.sub(r"^([\w.]+)\.target\b", r"\1._target_", line)


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    node: Any = Config
    for part in location:
        # `updates`, the only list of sections, has numbers in its locations
        node = Update if isinstance(part, int) else next(f.type for f in dataclasses.fields(node) if f.name == part)
    return [f.name for f in dataclasses.fields(node) if f.name not in FILLED_IN]
