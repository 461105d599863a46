"""Frozen parameters: they have no gradients and no optimizer state, and torch saves no activations for them alone.

A layer needs its input for its weight's gradient, and its weight for its input's. What lies before the first parameter
that is trained needs neither, so that nothing of it is saved.
"""

import fnmatch
from collections.abc import Sequence

from torch import nn

from trainapp.errors import UserError
from trainapp.units import listed


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that the patterns name: a parameter, a module with all that is in it, or shell wildcards,
    whose `*` matches dots too. A tensor with several names (tied weights) is frozen by each of them.

    Raises UserError for a pattern that names nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        named = [name for name in parameters if _names(pattern, name)]
        if not named:
            modules = listed(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise UserError(
                f"model.freeze=[{pattern}]: {type(model).__name__} has no parameter or module of this name; at the top "
                f"are {modules}; name one of them, a parameter such as {next(iter(parameters), 'weight')}, or use "
                "wildcards"
            )
        for name in named:
            parameters[name].requires_grad_(False)


def _names(pattern: str, name: str) -> bool:
    return name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
