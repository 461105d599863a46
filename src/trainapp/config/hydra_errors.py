"""Hydra's and OmegaConf's errors as messages for a user. Imports no torch."""

import re
import sys
from collections.abc import Iterable

from trainapp.config.validation import suggest


def fail(text: str) -> None:
    """A message about something that the user can put right, without a trace."""
    first, *rest = text.splitlines() or [""]
    print("\n".join([f"trainapp: {first}", *(f"          {line}" for line in rest)]), file=sys.stderr)


def explain_hydra(error: Exception, groups: Iterable[str] = ()) -> str:
    """Hydra's own words for a mistake on the command line, without its advice to force the unknown key in.

    groups: the config groups that exist, which may be what a misspelt first word was meant to be.
    """
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
        known = [*_keys_beside(error, key), *(() if parent else groups)]
        hint = suggest(key, known) or (f"; known in {parent}: {', '.join(known)}" if parent and known else "")
        return f"{path}: no such setting{hint} (`trainapp --cfg job` shows all of them)"
    cause = str(error.__cause__).strip() if error.__cause__ else ""
    return text if not cause or cause in text else f"{text}\n{cause}"


def _keys_beside(error: BaseException, key: str) -> list[str]:
    """The keys that exist where the unknown one was meant to be: OmegaConf's error carries the node."""
    cause = error.__cause__ or error
    node = getattr(cause, "parent_node", None)
    try:
        return [str(name) for name in node] if node is not None else []
    except TypeError:
        return []
