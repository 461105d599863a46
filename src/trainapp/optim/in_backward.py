"""Steps of an optimizer for one parameter at a time, as soon as the backward has completed its gradient.

The method is that of LOMO (arXiv:2306.09782), with any optimizer whose update of a parameter needs no other gradient
than that parameter's.
"""

import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.torch_private import step_optimizer


def require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for an optimizer that may need several gradients at once, or count its calls."""
    kind = type(optimizer)
    is_known = kind.__module__.partition(".")[0] in ("torch", "trainapp")
    if not (is_known or getattr(kind, "updates_parameters_alone", False)):
        raise UserError(
            f"optimizer.in_backward=true with {kind.__name__}: it is called once per parameter, and may need all "
            "gradients at once; if it does not, say so with `updates_parameters_alone = True` in its class, else use "
            "optimizer.in_backward=false"
        )


class ParameterSteps:
    """Valid for one step: parameters may be replaced between two."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def trains(self, parameter: Tensor) -> bool:
        """Whether the optimizer has this parameter."""
        return id(parameter) in self._group_of

    def step(self, parameter: Tensor) -> None:
        """Update this parameter alone."""
        groups, own = self._optimizer.param_groups, self._group_of[id(parameter)]
        all_parameters = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter] if group is own else []
        try:
            step_optimizer(self._optimizer)
        finally:
            for group, parameters in zip(groups, all_parameters, strict=True):
                group["params"] = parameters
