"""Parameters by name: what `model.freeze`, `optimizer.groups` and `updates` match."""

import fnmatch
from collections.abc import Mapping

from torch import nn

from trainapp.errors import UserError
from trainapp.units import listed


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a parameter: by its name, by that of a module that holds it, or by shell wildcards, whose
    `*` matches dots, too.
    """
    return name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


def all_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters under each of their names: tied weights have several."""
    return dict(model.named_parameters(remove_duplicate=False))


def matching(pattern: str, parameters: Mapping[str, nn.Parameter], setting: str, owner: str) -> list[str]:
    """The names that the pattern matches. Raises UserError where there is none.

    setting: that the pattern comes from, and owner: whose parameters these are, for the message.
    """
    named = [name for name in parameters if matches(pattern, name)]
    if not named:
        modules = listed(dict.fromkeys(name.partition(".")[0] for name in parameters))
        raise UserError(
            f"{setting}: {owner} has no parameter or module of this name; at the top are {modules or 'none'}; name one "
            f"of them, a parameter such as {next(iter(parameters), 'weight')}, or use wildcards"
        )
    return named
