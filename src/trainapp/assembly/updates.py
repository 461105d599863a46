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
from trainapp.data.progress import Cadence
from trainapp.errors import UserError
from trainapp.models.inspect import blocks_of
from trainapp.optim.groups import divide_names, parameters_by_name
from trainapp.optim.optimizers import build_optimizer, require_separable
from trainapp.optim.precision import Precision
from trainapp.parallel.strategy import requires_grad_only
from trainapp.units import listed

Names = list[list[str]]  # parameter names of each update, including frozen ones


def names_of(config: Config, model: nn.Module) -> Names:
    """Return each update's parameter names. Raises UserError as `divide_names`, and for parameters in no update."""
    parameters = parameters_by_name(model)
    if not config.updates:
        return [list(parameters)]
    patterns = {f"updates.{number}.parameters": update.parameters for number, update in enumerate(config.updates)}
    names_by_update = list(divide_names(model, patterns).values())

    # By identity: a tied weight has several names, of which one suffices.
    trained_ids: set[int] = set()
    for names in names_by_update:
        trained_ids.update(id(parameters[name]) for name in names)
    untrained = []
    for name, parameter in parameters.items():
        if parameter.requires_grad and id(parameter) not in trained_ids:
            untrained.append(name)
    if untrained:
        raise UserError(
            f"updates: no update trains {listed(untrained)}; add them to the parameters of one, or to model.freeze"
        )
    return names_by_update


def parameters_of(model: nn.Module, names_by_update: Names) -> list[list[nn.Parameter]]:
    """Return the parameters that each update trains."""
    parameters = parameters_by_name(model)
    trained_by_update = []
    for names in names_by_update:
        unique = dict.fromkeys(parameters[name] for name in names)
        trained_by_update.append([parameter for parameter in unique if parameter.requires_grad])
    return trained_by_update


def build(
    config: Config, model: nn.Module, names_by_update: Names, precision: Precision, device: torch.device
) -> list[Update]:
    """Return the updates, with their optimizers. Call once the model is spread over the ranks."""
    trained_by_update = parameters_of(model, names_by_update)
    every_trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updates = []
    for number, (setting, settings) in enumerate(config.optimizers.items()):
        trained = trained_by_update[number]
        decay = settings.layer_decay

        # The optimizer takes the parameters that require gradients: for now, those of its update.
        with requires_grad_only(trained, every_trained):
            blocks: list[nn.Module] = []
            if decay is not None:
                blocks = blocks_of(model, f"{setting}.layer_decay={decay}")
            optimizer = build_optimizer(settings, model, device, config.user_packages, blocks, setting)
            if settings.in_backward:
                require_separable(optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]

        # Each update has its own loss scale.
        with_scaler = dataclasses.replace(precision, scaler=copy.deepcopy(precision.scaler))
        updates.append(Update(optimizer, with_scaler, parameters=trained, number=number))

    # Without `updates`, the only one has no name and is made in every step.
    for update, settings_of_update in zip(updates, config.updates, strict=False):
        update.name = settings_of_update.name
        update.cadence = Cadence(settings_of_update.every, settings_of_update.offset)
    return updates
