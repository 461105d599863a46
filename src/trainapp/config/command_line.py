"""The command line: additions to Hydra's overrides, and commands and overrides as text. Imports no torch."""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, ListConfig, OmegaConf

from trainapp.config.modes import ACTIVITIES
from trainapp.config.schema import Config
from trainapp.files import CONF

_TASK_ARGUMENT = re.compile(r"\+{0,2}task\.")
_HYDRAS_TASK_ARGUMENT = "++task_arguments."  # see `for_hydra`
_HYDRAS_TASK = "++task"  # of a task that is a mapping, whose arguments another one may lack
_FLAGS_BEFORE_A_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--experimental-rerun", "--info", "-i"),
)


def add_import_paths(arguments: Sequence[str]) -> None:
    """Make users' modules importable from the working directory and from their --config-dir.

    `python -m` puts the working directory on the path and a console script does not; this makes the two behave alike.
    """
    folders = [os.getcwd()]
    previous = ""
    for argument in arguments:
        if previous in ("--config-dir", "-cd"):
            folders.append(os.path.abspath(argument))
        elif argument.startswith("--config-dir="):
            config_dir = argument.removeprefix("--config-dir=")
            folders.append(os.path.abspath(config_dir))
        previous = argument
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


# From user input to Hydra's overrides


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return Hydra's flags, then its overrides, with the `+` marks that trainapp lets users omit.

    `mode=predict checkpointing.resume=RUN data.path=FILE` changes a setting of the run's data, which the default option
    may lack: see `run.resume`. `task.output=0` is composed separately, since a YAML file may give the task as a mere
    name, which cannot hold an argument: see `compose.from_hydra`, which also sees to it that `task={_target_: CLASS}`
    replaces a task that is a mapping, while Hydra merges them. (For settings of a class that is named, see
    `replaced_options`.)
    """
    texts = [for_composition(argument) for argument in _flags_first(arguments)]
    if not _use_the_data_of_a_run(texts):
        return texts
    marked = []
    for text in texts:
        if text.startswith("data."):
            text = f"++{text}"
        marked.append(text)
    return marked


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the flags and their values first: Hydra's parser refuses overrides on both sides."""
    flags = []
    overrides = []
    previous = ""
    for argument in arguments:
        is_value_of_flag = previous in _FLAGS_BEFORE_A_VALUE
        if argument.startswith("-") or is_value_of_flag:
            flags.append(argument)
        else:
            overrides.append(argument)
        previous = argument
    return [*flags, *overrides]


def _use_the_data_of_a_run(overrides: Iterable[str]) -> bool:
    """Return whether these overrides name a trained run, and choose no other data than the run's."""
    values = {}
    for text in overrides:
        name, _, value = text.partition("=")
        values[name] = value

    # A command about a trained run.
    activity = ACTIVITIES.get(values.get("mode", ""))
    if activity is None or not activity.needs_checkpoint or "checkpointing.resume" not in values:
        return False

    # Other data: a group's option, a class, or an experiment, which may choose one.
    return values.keys().isdisjoint({"data", "data._target_", "experiment"})


def for_composition(text: str) -> str:
    """Return an override in the form in which a task that is a mapping, an argument of the task, or its class is
    composed; see `for_hydra`.
    """
    if text.startswith("task={"):
        return _HYDRAS_TASK + text.removeprefix("task")
    prefix = _TASK_ARGUMENT.match(text)
    if prefix is None:
        return text
    return _HYDRAS_TASK_ARGUMENT + text[prefix.end() :]


def as_entered(text: str) -> str:
    """Return an override as the user writes it: undo `for_composition`."""
    if text == _HYDRAS_TASK or text.startswith(f"{_HYDRAS_TASK}={{"):
        return text.removeprefix("++")
    if text.startswith(_HYDRAS_TASK_ARGUMENT):
        return f"task.{text.removeprefix(_HYDRAS_TASK_ARGUMENT)}"
    return text


# Commands and overrides shown to users


def command(flags_and_overrides: Iterable[str], run_dir: str = "") -> str:
    """Return the shell command with these flags and overrides, for this directory."""
    arguments = list(flags_and_overrides)
    if run_dir:
        arguments.append(override("hydra.run.dir", run_dir))
    quoted_arguments = [shlex.quote(argument) for argument in arguments]
    return " ".join(["python -m trainapp", *quoted_arguments])


def flags(hydra_config: HydraConf | DictConfig) -> list[str]:
    """Return Hydra's flags on the command line that decide what is composed."""
    # Where Hydra looks for files, besides the program's own.
    config_dirs = []
    config_paths = []
    for source in hydra_config.runtime.config_sources:
        if source.provider == "command-line":
            config_dirs.append(f"--config-dir={source.path}")
        elif source.provider == "main" and source.path != str(CONF):
            config_paths.append(f"--config-path={source.path}")

    # The configuration to start from.
    config_name = []
    name = hydra_config.job.config_name
    if name != "train":
        config_name.append(f"--config-name={name}")
    return [*config_dirs, *config_paths, *config_name]


def overrides(hydra_config: HydraConf) -> list[str]:
    """Return the command line's overrides, without the checkpoint that training resumed: the run soon has its own."""
    node = cast(ListConfig, hydra_config.overrides.task)
    texts = cast(list[str], OmegaConf.to_container(node, resolve=False))  # an override may contain an interpolation
    modes = [text for text in texts if text.startswith("mode=")]
    if set(modes) <= {"mode=train"}:
        texts = [text for text in texts if not text.startswith("checkpointing.resume=")]
    return [as_entered(text) for text in texts]


def override(name: str, value: str) -> str:
    """Return `NAME=VALUE`, as Hydra reads it back: quoted unless it is a path, since a word may be null or a number."""
    is_plain_path = "/" in value and re.fullmatch(r"[\w/.:+-]+", value, re.ASCII)
    if not is_plain_path:
        value = quoted(value)
    return f"{name}={value}"


def quoted(value: str) -> str:
    """Return `value` in quotes, as Hydra and OmegaConf read it back: `${` does not start an interpolation. Backslashes
    are literal except before a quote and before `${`.
    """
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # those before it are doubled, and one more makes it literal
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)\Z", r"\1\1", text)  # before the closing quote
    return f"'{text}'"


def with_changes(texts: Iterable[str], changes: Iterable[str]) -> list[str]:
    """Return flags and overrides with changes: the later one of a setting, or of a group's option, takes the earlier
    one's place and mark; flags come first. A class that was named for a group goes, with its settings, where an option
    is chosen instead.
    """
    by_setting = {_setting_of(text): text for text in texts}
    changes = list(changes)

    # Drop classes first: a change may itself name one.
    for change in changes:
        if "=" in change and not change.startswith("~"):
            _drop_class(by_setting, _setting_of(change))

    # A dictionary keeps the place of a setting whose override is replaced.
    for change in changes:
        setting = _setting_of(change)
        if not change.startswith(("+", "~")):
            change = _mark_of(by_setting.get(setting, "")) + change
        by_setting[setting] = change

    flag_texts = [text for text in by_setting.values() if text.startswith("-")]
    override_texts = [text for text in by_setting.values() if not text.startswith("-")]
    return [*flag_texts, *override_texts]


def _setting_of(text: str) -> str:
    """Return the setting or group of an override; a flag is returned as it is."""
    if text.startswith("-"):
        return text
    return text.lstrip("+~").partition("=")[0]


def _mark_of(override: str) -> str:
    """Return the `+` or `++` before an override."""
    return override.removesuffix(override.lstrip("+"))


def _drop_class(by_setting: dict[str, str], group: str) -> None:
    """Remove the overrides of a group in which one names a class."""
    if not any(_names_class(text, group) for text in by_setting.values()):
        return
    for setting in list(by_setting):
        if f"{setting}.".startswith(f"{group}."):
            del by_setting[setting]


def _names_class(text: str, group: str) -> bool:
    """Return whether an override names a class in place of a group's option."""
    return re.match(rf"\+*{re.escape(group)}(\._target_=|=\{{.*_target_)", text, re.DOTALL) is not None


def size_overrides(config: Config, size: int) -> list[str]:
    """Return the overrides that set the micro-batch size, overriding all other settings that determine it."""
    texts = []
    if config.batch.micro_schedule is not None:
        texts.append("batch.micro_schedule=null")
    if config.accumulation.steps != "auto":
        texts.append("accumulation.steps=auto")
    texts.append(f"batch.micro_size={size}")
    return texts


def message_in(lines: Iterable[str]) -> list[str]:
    """Return the lines of the last message for the user in a process's output, as `__main__` prints it."""
    message: list[str] = []
    for line in lines:
        if line.startswith("trainapp: "):
            message = [line.removeprefix("trainapp: ").strip()]
        elif message and line.startswith(" " * 10):  # as wide as "trainapp: "
            message.append(line.strip())
    return message
