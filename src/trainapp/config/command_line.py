"""What the command line says beyond Hydra: import paths of users' modules, classes named in place of an option, and
the command that resumes a run. Imports no torch.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from hydra.conf import HydraConf
from omegaconf import ListConfig, OmegaConf

from trainapp.config.schema import Config

_OWN_CLASS = re.compile(r"\+?(data|model|optimizer|schedule)(\._target_=|=\{.*_target_)", re.DOTALL)


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


def with_own_classes(arguments: Sequence[str]) -> list[str]:
    """Hydra's overrides, where `optimizer._target_=CLASS` or `optimizer={_target_: CLASS, ...}` begins without the
    settings of the default option, which are those of another class: its arguments then need no `+`.

    Where an option is chosen, too, as in `optimizer=sgd optimizer._target_=mine.SGD`, its settings stay. Other
    arguments of the command line may be among the overrides.
    """
    groups = {match[1] for text in arguments if (match := _OWN_CLASS.match(text))}
    groups = {group for group in groups if not any(_chooses(text, group) for text in arguments)}
    texts = []
    for text in arguments:
        group = next((own for own in groups if re.match(rf"(\+{{0,2}}|~){own}[.=]", text)), None)
        if group is None:
            texts.append(text)
        elif not text.startswith("~"):  # a setting of the option, which is not there
            texts += [f"~{group}"] * bool(_OWN_CLASS.match(text)) + [f"++{text.lstrip('+')}"]
    return texts


def _chooses(text: str, group: str) -> bool:
    return text == f"~{group}" or (text.startswith(f"{group}=") and not _OWN_CLASS.match(text))


def command(given: Iterable[str], run_dir: str = "", config_dirs: Iterable[str | Path] = ()) -> str:
    """The shell command of these overrides, in this directory."""
    words = ["python -m trainapp"]
    words += [f"--config-dir {shlex.quote(str(folder))}" for folder in config_dirs]
    words += map(shlex.quote, given)
    return " ".join([*words, *([shlex.quote(override("hydra.run.dir", run_dir))] if run_dir else [])])


def resume_command(hydra_config: HydraConf, run_dir: str) -> str:
    """The shell command that continues this run: the same overrides, in the same directory."""
    sources = hydra_config.runtime.config_sources
    folders = [source.path for source in sources if source.provider == "command-line"]
    return command(overrides(hydra_config), run_dir, folders)


def overrides(hydra_config: HydraConf) -> list[str]:
    """What the command line sets, but for the checkpoint that a training resumes: it soon has its own."""
    task = cast(ListConfig, hydra_config.overrides.task)
    given = cast(list[str], OmegaConf.to_container(task, resolve=False))  # an override may contain an interpolation
    # Weights to begin with are needed until the run has a checkpoint of its own, which then comes first.
    begins_with_weights = any(text.lstrip("+").startswith("checkpointing.load=") for text in given)
    trains = all(text == "mode=train" for text in given if text.startswith("mode="))
    is_needed = begins_with_weights or not trains
    return [text for text in given if is_needed or not text.startswith("checkpointing.resume=")]


def override(name: str, value: str) -> str:
    """`NAME=VALUE`, as Hydra reads it back: quoted unless it is a plain path. (A word may be a number, or null.)"""
    is_plain = "/" in value and re.fullmatch(r"[\w/.:+-]+", value, re.ASCII)
    return f"{name}={value if is_plain else quoted(value)}"


def quoted(value: str) -> str:
    """`value` between quotes, as Hydra and OmegaConf read it back: `${` does not begin an interpolation. Backslashes
    stand for themselves but before a quote and before `${`.
    """
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal) + "'"


def size_overrides(config: Config, size: int) -> list[str]:
    """The overrides that set the micro-batch, whatever else would set it."""
    others = ["batch.micro_schedule=null"] if config.batch.micro_schedule is not None else []
    others += ["accumulation.steps=auto"] if config.accumulation.steps != "auto" else []
    return [*others, f"batch.micro_size={size}"]
