"""Frozen parameters: they have no gradients and no optimizer state, and torch saves no activations for them alone.

A layer needs its input for its weight's gradient, and its weight for its input's. What lies before the first parameter
that is trained needs neither, so that nothing of it is saved.
"""

from collections.abc import Sequence

from torch import nn

from trainapp.optim.groups import all_names, matching


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that the patterns name: a parameter, a module with all that is in it, or shell wildcards,
    whose `*` matches dots too. A tensor with several names (tied weights) is frozen by each of them.

    Raises UserError for a pattern that names nothing.
    """
    parameters = all_names(model)
    for pattern in patterns:
        for name in matching(pattern, parameters, f"model.freeze=[{pattern}]", type(model).__name__):
            parameters[name].requires_grad_(False)
