"""Hydra's and OmegaConf's errors as messages for a user. Imports no torch."""

import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

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
        return _explain_composition(error)
    if isinstance(error, ValueError) and str(error).startswith("Config group override"):  # Hydra's, for precision=16
        return f"{_argument_without_name(arguments)}an option is chosen by its name; `trainapp --help` lists them"
    if isinstance(error, OSError) and not _raised_in_job(error):
        return f"{error.filename}: {error.strerror}; hydra.run.dir or hydra.sweep.dir must name a folder of yours"
    return None


def _explain_composition(error: Exception) -> str:
    """Hydra's message, without its advice to add the unknown key with `+`."""
    text = str(error).strip().partition("\nConfig search path:")[0].strip()
    option = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if option:
        group, name = option.groups()
        choices = re.findall(r"^\s+(\S+)$", text.partition("Available options")[2], re.MULTILINE)
        return f"{group}={name}: no such option{suggest(name, choices)}; available: {', '.join(choices) or 'none'}"
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        path = override[1]
        parent, _, key = path.rpartition(".")
        known = [*_keys_beside(error), *(() if parent else _groups())]
        hint = suggest(key, known) or (f"; known in {parent}: {', '.join(known)}" if parent and known else "")
        return f"{path}: no such setting{hint} (`trainapp --cfg job` shows all of them)"
    cause = str(error.__cause__).strip() if error.__cause__ else ""
    return text if not cause or cause in text else f"{text}\n{cause}"


def _keys_beside(error: BaseException) -> list[str]:
    """The keys that exist where the unknown one was meant to be: OmegaConf's error carries the node."""
    cause = error.__cause__ or error
    node = getattr(cause, "parent_node", None)
    try:
        return [str(name) for name in node] if node is not None else []
    except TypeError:
        return []


def _groups() -> Iterable[str]:
    """The config groups, as candidates for a misspelt first word."""
    return (folder.name for folder in CONF.iterdir() if folder.is_dir())


def _argument_without_name(arguments: Sequence[str]) -> str:
    """`precision=16: ` if such an argument was given, else an empty string."""
    for argument in arguments:
        group, _, option = argument.partition("=")
        is_name = option in ("on", "off", "yes", "no") or isinstance(yaml.safe_load(option), str | list)  # as for Hydra
        if (CONF / group.lstrip("+~")).is_dir() and not is_name:
            return f"{argument}: "
    return ""


def _raised_in_job(error: BaseException) -> bool:
    """Whether the error was raised by a run rather than by Hydra's set-up."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "job" and Path(frame.filename) == PACKAGE / "__main__.py" for frame in frames)
