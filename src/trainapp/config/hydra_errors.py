"""Hydra's and OmegaConf's errors as messages for a user. Imports no torch."""

import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainapp.config import setting_hints, targets
from trainapp.config.inline_targets import GROUPS
from trainapp.config.validation import suggest
from trainapp.paths import CONF, PACKAGE


def fail(text: str) -> None:
    """Print a message about something that the user can correct, without a traceback."""
    first, *rest = text.splitlines() or [""]
    print("\n".join([f"trainapp: {first}", *(f"          {line}" for line in rest)]), file=sys.stderr)


def explain(error: BaseException, arguments: Sequence[str] = ()) -> str | None:
    """The message for a mistake on the command line that ended Hydra, or None for an error that needs its traceback.

    arguments: the command line, searched for the one that the error does not name.
    """
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _explain_composition(error, arguments)
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):  # Hydra's, for precision=16
        return f"{_argument_without_name(arguments)}an option is chosen by its name; `trainapp --help` lists them"
    if isinstance(error, OSError) and not _raised_in_job(error):
        return f"{error.filename}: {error.strerror}; hydra.run.dir or hydra.sweep.dir must name a folder of yours"
    return None


def _explain_composition(error: Exception, arguments: Sequence[str]) -> str:
    """Hydra's message; `+` is advised only for an argument that the constructor takes."""
    text = str(error).strip().partition("\nConfig search path:")[0].strip()
    option = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if option:
        group, name = option.groups()
        choices = re.findall(r"^\s+(\S+)$", text.partition("Available options")[2], re.MULTILINE)
        hint = setting_hints.of_option(group, name, arguments)
        close = suggest(name, choices) or suggest(name.lower(), choices)
        return f"{group}={name}: no such option{close}; available: {', '.join(choices) or 'none'}{hint}"
    nameless = re.match(r"Error parsing override '([\w-]+)'\nmissing EQUAL", text)
    if nameless:
        return setting_hints.of_argument(nameless[1])
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        return _unknown_setting(override[1], error, arguments)
    cause = str(error.__cause__).strip() if error.__cause__ else ""
    return text if not cause or cause in text else f"{text}\n{cause}"


def _unknown_setting(path: str, error: BaseException, arguments: Sequence[str]) -> str:
    """For an override of a key that does not exist. An argument of a constructor may be missing in the YAML only."""
    parent, _, key = path.rpartition(".")
    node = _node_of(error)
    has_target = node is not None and "_target_" in node
    if key == "_target_" and not has_target and parent in GROUPS:
        chosen = next((f" {text}" for text in arguments if text.startswith(f"{parent}=")), "")
        return (
            f"{path}: the option{chosen or f' chosen for {parent}'} names no class that this could replace; leave it "
            f"out: {path}=CLASS alone begins without an option, and its settings are the arguments of CLASS"
        )
    listed = [str(name) for name in node if name != "_target_"] if node is not None else []
    known = [*listed, *(() if parent else _groups())]
    close, shown = suggest(key, [*known, *["_target_"] * has_target]), "(`trainapp --cfg job` shows all of them)"
    value = next((text.partition("=")[2] for text in arguments if text.startswith(f"{path}=")), "VALUE")
    of_class = parent in ("data", "model", "optimizer") and not close and has_target
    name, takes = _constructor(node, arguments) if of_class else ("", [])
    if key in takes:
        return f"{path}: the option's YAML file does not list this argument of {name}; set it with +{path}={value}"
    meant = setting_hints.of_setting(path)
    if meant is None and not close and not has_target:
        meant = setting_hints.of_entry(path, value, _options(path.partition(".")[0]))
    if meant:
        return f"{path}: no such setting{meant} {shown}"
    if of_class:
        unlisted = [argument for argument in takes if argument not in listed]
        others = ""
        if not takes:
            others = f"; an argument of {name} that the YAML file does not list is set with +{path}={value}"
        elif unlisted:
            others = f"; {name} takes {', '.join(unlisted)} as well, set with + as in +{parent}.{unlisted[0]}=VALUE"
        return f"{path}: no such setting; known in {parent}: {', '.join(listed)}{others}"
    hint = close or (f"; known in {parent}: {', '.join(known)}" if parent and known else "")
    return f"{path}: no such setting{hint} {shown}"


def _node_of(error: BaseException) -> Any:
    """The mapping where the unknown key was meant to be, which OmegaConf's error carries; None if it is none."""
    node = getattr(error.__cause__ or error, "parent_node", None)
    return node if OmegaConf.is_dict(node) else None


def _constructor(node: Any, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """What the node's `_target_` names, and the arguments that it takes; none where that cannot be found out."""
    target = str(OmegaConf.select(node, "_target_", throw_on_resolution_failure=False))
    allowed = OmegaConf.select(node._get_root(), "user_packages", throw_on_resolution_failure=False)
    packages = list(allowed) if isinstance(allowed, ListConfig) else []
    for text in arguments:  # overrides after the wrong one are not applied yet
        if text.startswith("user_packages=") and isinstance(given := _value(text), list):
            packages += map(str, given)
    try:
        constructor = targets.locate(target, "_target_", packages)
        parameters = inspect.signature(constructor).parameters.values()
    except Exception:  # importing the user's module may raise anything; the run will report it
        return target, []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in named]
    shown = getattr(constructor, "__name__", target)  # an instance with `__call__` has no name of its own
    return shown, [name for name in names if name not in ("self", "params", "split")]


def _value(override: str) -> Any:
    """What is set; the text itself where it is no YAML, as Hydra's own grammar differs."""
    text = override.partition("=")[2]
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # the latter for 2026-13-45
        return text


def _groups() -> Iterable[str]:
    """The config groups, as candidates for a misspelt first word."""
    return (folder.name for folder in CONF.iterdir() if folder.is_dir())


def _options(group: str) -> list[str]:
    return [file.stem for file in (CONF / group).glob("*.yaml")]


def _argument_without_name(arguments: Sequence[str]) -> str:
    """`precision=16: ` if such an argument was given, else an empty string."""
    for argument in arguments:
        group, _, option = argument.partition("=")
        is_name = option in ("on", "off", "yes", "no") or isinstance(_value(argument), str | list)  # as for Hydra
        if (CONF / group.lstrip("+~")).is_dir() and not is_name:
            return f"{argument}: "
    return ""


def _raised_in_job(error: BaseException) -> bool:
    """Whether the error was raised by a run rather than by Hydra's set-up."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "job" and Path(frame.filename) == PACKAGE / "__main__.py" for frame in frames)
