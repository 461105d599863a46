"""Import paths for users' modules, and the command that resumes a run. Imports no torch."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import cast

from hydra.conf import HydraConf
from omegaconf import ListConfig, OmegaConf


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


def resume_command(hydra_config: HydraConf, run_dir: str) -> str:
    """The shell command that continues this run: the same overrides, in the same directory."""
    return " ".join(
        [
            "python -m trainapp",
            *(f"--config-dir {shlex.quote(folder)}" for folder in _config_directories(hydra_config)),
            *(shlex.quote(override) for override in overrides(hydra_config)),
            directory(run_dir),
        ]
    )


def directory(run_dir: str) -> str:
    """The argument of a shell command that names the run's directory."""
    return shlex.quote(override("hydra.run.dir", run_dir))


def override(name: str, value: str) -> str:
    """`NAME=VALUE`, as Hydra reads it back."""
    return f"{name}={_hydra_quoted(value)}"


def _config_directories(hydra_config: HydraConf) -> list[str]:
    return [source.path for source in hydra_config.runtime.config_sources if source.provider == "command-line"]


def overrides(hydra_config: HydraConf) -> list[str]:
    """What the command line sets, but for the checkpoint that a training resumes: it soon has its own."""
    task = cast(ListConfig, hydra_config.overrides.task)
    given = cast(list[str], OmegaConf.to_container(task, resolve=False))  # an override may contain an interpolation
    # Weights to begin with are needed until the run has a checkpoint of its own, which then comes first.
    begins_with_weights = any(text.lstrip("+").startswith("checkpointing.load=") for text in given)
    trains = all(text == "mode=train" for text in given if text.startswith("mode="))
    is_needed = begins_with_weights or not trains
    return [text for text in given if is_needed or not text.startswith("checkpointing.resume=")]


def _hydra_quoted(value: str) -> str:
    """`value`, quoted where Hydra's grammar would not read it as one plain word: its letters are those of ASCII, and a
    word without a slash may be a number or null.
    """
    if "/" in value and re.fullmatch(r"[\w/.:+-]+", value, re.ASCII):
        return value
    return quoted(value)


def quoted(value: str) -> str:
    """`value` between quotes, as Hydra and OmegaConf read it back: `${` does not begin an interpolation. Backslashes
    stand for themselves but before a quote and before `${`.
    """
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal) + "'"
