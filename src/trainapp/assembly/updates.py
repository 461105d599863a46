"""Several optimizers (`updates`): the parameters of each, and their assembly.

A step is then one transaction per update, in order, on the same samples. Without `updates` it has only one, which
trains all parameters that require gradients.
"""

import copy
import dataclasses

import torch
from torch import nn

from trainapp.checkpoint.train_state import Update
from trainapp.config.schema import Config
from trainapp.data.source import Cadence
from trainapp.errors import UserError
from trainapp.models.inspect import blocks_of
from trainapp.optim.optimizers import all_names, build_optimizer, divided, require_separable
from trainapp.optim.precision import Precision
from trainapp.parallel.strategy import requires_grad_only
from trainapp.units import listed

Names = list[list[str]]  # parameter names of each update, including frozen ones


def names_of(config: Config, model: nn.Module) -> Names:
    """Each update's parameter names. Raises UserError as `divided` does, and for parameters in no update."""
    parameters = all_names(model)
    if not config.updates:
        return [list(parameters)]
    patterns = {f"updates.{number}.parameters": update.parameters for number, update in enumerate(config.updates)}
    found = list(divided(model, patterns).values())
    taken = {id(parameters[name]) for names in found for name in names}
    if left := [name for name, p in parameters.items() if p.requires_grad and id(p) not in taken]:
        raise UserError(
            f"updates: no update trains {listed(left)}; add them to the parameters of one, or to model.freeze"
        )
    return found


def parameters_of(model: nn.Module, names: Names) -> list[list[nn.Parameter]]:
    """The parameters that each update trains."""
    parameters = all_names(model)
    unique = [dict.fromkeys(parameters[name] for name in own) for own in names]
    return [[parameter for parameter in own if parameter.requires_grad] for own in unique]


def build(config: Config, model: nn.Module, names: Names, precision: Precision, device: torch.device) -> list[Update]:
    """The updates, with their optimizers. Call once the model is spread over the ranks."""
    every = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = parameters_of(model, names)
    updates = []
    for number, ((setting, settings), own) in enumerate(zip(config.optimizers.items(), trained, strict=True)):
        decay = settings.layer_decay
        with requires_grad_only(own, every):
            blocks = blocks_of(model, f"{setting}.layer_decay={decay}") if decay is not None else []
            optimizer = build_optimizer(settings, model, device, config.user_packages, blocks, setting)
            if settings.in_backward:
                require_separable(optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        scaled = dataclasses.replace(precision, scaler=copy.deepcopy(precision.scaler))  # each has its own loss scale
        updates.append(Update(optimizer, scaled, parameters=own, number=number))
    for update, given in zip(updates, config.updates, strict=False):  # without `updates`, the only one has no name
        update.name = given.name
        update.cadence = Cadence(given.every, given.offset)
    return updates
