"""The command line: its additions to Hydra's overrides, writing overrides and commands, and messages for unknown names.
Imports no torch.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import cast

import yaml
from hydra.conf import HydraConf
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainapp.config.schema import ABOUT_A_RUN, Config
from trainapp.files import CONF
from trainapp.units import suggest

_TASK_ARGUMENT = re.compile(r"\+{0,2}task\.")
_HYDRAS_TASK_ARGUMENT = "++task_arguments."  # see `for_hydra`


def add_import_paths(arguments: Sequence[str]) -> None:
    """Make users' modules importable from the working directory and from their --config-dir.

    `python -m` puts the working directory on the path and a console script does not; this makes the two behave alike.
    """
    folders = [os.getcwd()]
    for position, argument in enumerate(arguments):
        if argument in ("--config-dir", "-cd") and position + 1 < len(arguments):
            folders.append(os.path.abspath(arguments[position + 1]))
        elif argument.startswith("--config-dir="):
            folders.append(os.path.abspath(argument.partition("=")[2]))
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


# From user input to Hydra's overrides


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Hydra's overrides, with the `+` marks that trainapp lets users omit. Other arguments are kept.

    `mode=predict checkpointing.resume=RUN data.path=FILE` changes a setting of the run's data, which the default option
    may lack: see `run.resume`. `task.output=0` is composed separately, since a YAML file may give the task as a mere
    name, which cannot hold an argument: see `compose.from_hydra`. (For settings of a class that is named, see
    `replaced_options`.)
    """
    texts = [for_composition(text) for text in arguments]
    values = dict(text.partition("=")[::2] for text in texts)
    keeps_data = not values.keys() & {"data", "data._target_", "experiment"}
    if values.get("mode") in ABOUT_A_RUN and "checkpointing.resume" in values and keeps_data:
        return [f"++{text}" if text.startswith("data.") else text for text in texts]
    return texts


def for_composition(text: str) -> str:
    """Return an override in the form in which an argument of the task, or its class, is composed; see `for_hydra`."""
    setting = _TASK_ARGUMENT.match(text)
    if setting is None:
        return text
    rest = text[setting.end() :]
    return f"task={rest.partition('=')[2]}" if rest.startswith("_target_=") else f"{_HYDRAS_TASK_ARGUMENT}{rest}"


def as_entered(text: str) -> str:
    """Return an override as the user writes it: undo `for_composition`."""
    if text.startswith(_HYDRAS_TASK_ARGUMENT):
        return f"task.{text.removeprefix(_HYDRAS_TASK_ARGUMENT)}"
    return text


# Commands and overrides shown to users


def command(given: Iterable[str], run_dir: str = "") -> str:
    """The shell command with these flags and overrides, for this directory."""
    own = [override("hydra.run.dir", run_dir)] if run_dir else []
    return " ".join(["python -m trainapp", *map(shlex.quote, [*given, *own])])


def flags(hydra_config: HydraConf | DictConfig) -> list[str]:
    """Hydra's flags on the command line that decide what is composed."""
    sources, name = hydra_config.runtime.config_sources, hydra_config.job.config_name
    found = [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"]
    found += [f"--config-path={own.path}" for own in sources if own.provider == "main" and own.path != str(CONF)]
    return found if name == "train" else [*found, f"--config-name={name}"]


def overrides(hydra_config: HydraConf) -> list[str]:
    """The command line's overrides, without the checkpoint that training resumed: the run soon has its own."""
    task = cast(ListConfig, hydra_config.overrides.task)
    given = cast(list[str], OmegaConf.to_container(task, resolve=False))  # an override may contain an interpolation
    trains = all(text == "mode=train" for text in given if text.startswith("mode="))
    return [as_entered(text) for text in given if not (trains and text.startswith("checkpointing.resume="))]


def override(name: str, value: str) -> str:
    """`NAME=VALUE`, as Hydra reads it back: quoted unless it is a plain path. (A word may be a number, or null.)"""
    is_plain = "/" in value and re.fullmatch(r"[\w/.:+-]+", value, re.ASCII)
    return f"{name}={value if is_plain else quoted(value)}"


def with_changes(given: Iterable[str], changes: Iterable[str]) -> list[str]:
    """Overrides in which the later one of a setting, or of a group's option, takes the earlier one's place and mark;
    flags come first. A class that was named for a group goes, with its settings, where an option is chosen instead.
    """
    texts = {_setting_of(text): text for text in given}
    changes = list(changes)
    for group in (_setting_of(change) for change in changes if "=" in change and not change.startswith("~")):
        if any(_names_class(text, group) for text in texts.values()):
            texts = {name: text for name, text in texts.items() if not f"{name}.".startswith(f"{group}.")}
    for change in changes:
        name = _setting_of(change)
        before = texts.get(name, "")
        mark = before[: len(before) - len(before.lstrip("+"))]
        texts[name] = change if change.startswith(("+", "~")) else mark + change
    return sorted(texts.values(), key=lambda text: not text.startswith("-"))


def _names_class(text: str, group: str) -> bool:
    """Whether an override names a class in place of a group's option."""
    return re.match(rf"\+*{re.escape(group)}(\._target_=|=\{{.*_target_)", text, re.DOTALL) is not None


def _setting_of(text: str) -> str:
    return text if text.startswith("-") else text.lstrip("+~").partition("=")[0]


def quoted(value: str) -> str:
    """`value` in quotes, as Hydra and OmegaConf read it back: `${` does not start an interpolation. Backslashes are
    literal except before a quote and before `${`.
    """
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal) + "'"


def size_overrides(config: Config, size: int) -> list[str]:
    """The overrides that set the micro-batch size, overriding all other settings that determine it."""
    others = ["batch.micro_schedule=null"] if config.batch.micro_schedule is not None else []
    others += ["accumulation.steps=auto"] if config.accumulation.steps != "auto" else []
    return [*others, f"batch.micro_size={size}"]


def message_in(lines: Iterable[str]) -> list[str]:
    """The last message for the user in a process's output, as `__main__` prints it: its lines."""
    message: list[str] = []
    for line in lines:
        if line.startswith("trainapp: "):
            message = [line.removeprefix("trainapp: ").strip()]
        elif message and line.startswith(" " * 10):
            message.append(line.strip())
    return message


# Names that do not exist

# Settings and options (`group=option`) of earlier versions, and their replacements.
RENAMED = {
    "activation_checkpointing=budget": "is now activation_checkpointing=auto",
    "activation_checkpointing.bytes": "was removed; activation_checkpointing=auto keeps what fits memory.limit",
    "batch.micro_size=plan": "was removed; mode=plan prints the size to set",
    "checkpointing.load": "was removed; start from another run's weights with model.init_from=RUN",
    "export.file_size": "was removed; safetensors has no size limit",
    "oom.keep_global_batch": "was removed; the global batch never changes, only its split into micro-batches",
    "oom.plan": "was removed; recovery uses what the failed step measured",
    "oom.remember": "was removed; a run depends only on its configuration and checkpoint",
    "optimizer=adamw_fp8": "was removed; use optimizer=adamw_8bit",
    "parallel.endpoint": "was removed; start a run on several machines with torchrun or srun",
    "parallel.nodes": "was removed; start a run on several machines with torchrun or srun",
    "parallel.run_id": "was removed; set the run's directory: hydra.run.dir=outputs/NAME",
    "plan.levers": "is now plan.techniques",
}


def renamed(setting: str, value: object = None) -> str | None:
    """A note on a setting, or a value of it, from an earlier version; None for all others."""
    for name in (setting, f"{setting}={value}", f"{setting.removesuffix('.mode')}={value}"):
        if name in RENAMED:
            return f"{name}: {RENAMED[name]}"
    return None


def explain(error: BaseException, arguments: Sequence[str]) -> str | None:
    """The message for a command-line mistake found by Hydra; None for an error that needs its traceback. Hydra's
    message, plus a suggestion if one is close.
    """
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):  # names no group
        override = next((text for text in arguments if re.fullmatch(r"\+?\w+=(-?[\d.]+|true|false|null)", text)), "")
        group, _, value = override.lstrip("+").partition("=")
        if value == "null":
            needed = group in ("data", "model", "optimizer", "schedule")
            instead = f"choose one, or a class with {group}._target_=CLASS" if needed else "for none, leave it out"
            return f"{override}: an option is chosen by its name; {instead}"
        return f"{override or error}: an option is chosen by its name; `trainapp --help` lists them"
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
        quoted = "; inside braces, ??? needs quotes" if error.problem and "'?'" in error.problem else ""
        return f"{place}: not valid YAML: {error.problem}{quoted}"
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    text = str(error).strip().partition("\nConfig search path:")[0].strip()
    text = re.sub(r"^Error when parsing index: .*\n", "", text)  # Hydra 1.4 repeats all overrides there
    if option := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, name = option.groups()
        choices = re.findall(r"^\s+(\S+)$", text.partition("Available options")[2], re.MULTILINE)
        available = f"no such option{suggest(name.lower(), choices)}; available: {', '.join(choices) or 'none'}"
        return renamed(group, name) or f"{group}={name}: {available}"
    if setting := re.search(r"Could not override '([^']+)'", text):
        return renamed(setting[1]) or f"{setting[1]}: no such setting{_meant(setting[1], error)}"
    cause = str(error.__cause__ or "").strip()
    return text if cause in text else f"{text}\n{cause}"


def _meant(path: str, error: BaseException) -> str:
    """A suggestion; otherwise how to add an argument that the YAML files do not list."""
    parent, _, key = path.rpartition(".")
    node = getattr(error.__cause__ or error, "parent_node", None)
    listed = [str(name) for name in node] if node is not None and OmegaConf.is_dict(node) else []
    known = f"; `trainapp --cfg job` shows all; to add one that the YAML files do not list, use +{path}=VALUE"
    return suggest(key, [*listed, *(() if parent else (folder.name for folder in CONF.iterdir()))]) or known
