"""The options of `optimizer.groups`: whether the optimizer has them, and takes their values."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainapp.config import targets
from trainapp.config.parameter_groups import OWN
from trainapp.config.schema import Optimizer
from trainapp.config.validation import check_arguments
from trainapp.errors import UserError

# Torch chooses one kernel for all groups; the others of these are about how it is called.
_OF_THE_WHOLE = ("fused", "foreach", "capturable", "differentiable")


def own_options(group: dict[str, Any]) -> dict[str, Any]:
    """What a group sets of its optimizer."""
    return {name: value for name, value in group.items() if name not in OWN}


def require_options(
    settings: Optimizer, kind: Any, arguments: dict[str, Any], user_packages: Sequence[str], setting: str = "optimizer"
) -> None:
    """Raises UserError for groups whose options the class does not have, or refuses."""
    takes = inspect.signature(kind).parameters
    errors = []
    for number, group in enumerate(settings.groups):
        place, options = f"{setting}.groups.{number}", own_options(group)
        errors += check_arguments(kind, options, place, takes)
        errors += [
            f"{place}.{name}: this is a setting of the whole optimizer; set {setting}.{name}, or leave it out"
            for name in _OF_THE_WHOLE
            if name in options
        ]
    if errors:
        raise UserError("\n".join(errors))
    if hasattr(kind, "parameter_groups"):
        return  # it may refuse a parameter that is none of the model's
    for number, group in enumerate(settings.groups):
        # An optimizer judges the values that its constructor is given, but none of a group's.
        options = {"lr": settings.lr, **arguments, **own_options(group)}
        options = {name: value for name, value in options.items() if name in takes and value is not None}
        place, trial = f"{setting}.groups.{number}", nn.Parameter(torch.zeros(2, 2))
        targets.construct(kind, options, place, user_packages, {"params": [trial]})


def require_known(settings: Optimizer, optimizer: torch.optim.Optimizer, setting: str = "optimizer") -> None:
    """Raises UserError for options of groups that the optimizer reads for all parameters alike."""
    for number, group in enumerate(settings.groups):
        unread = [name for name in own_options(group) if name not in optimizer.defaults]
        if unread:
            raise UserError(
                f"{setting}.groups.{number}.{unread[0]}: {type(optimizer).__name__} has one {unread[0]} for all "
                f"parameters; a group may have {', '.join(n for n in optimizer.defaults if n not in _OF_THE_WHOLE)}"
            )
