"""Several optimizers (`updates`): the parameters of each, and their assembly.

A step is then one transaction per update, in order, on the same samples. Without `updates` it has only one, which
trains all parameters that require gradients.
"""

import copy
import dataclasses
import functools

import torch
from torch import nn

from trainapp.assembly.components import Components
from trainapp.checkpoint.train_state import Update
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.losses.losses import needs_whole_batch
from trainapp.models.inspect import blocks_of
from trainapp.optim.optimizers import all_names, build_optimizer, matched, require_separable
from trainapp.optim.precision import Precision
from trainapp.parallel.strategy import trained_alone
from trainapp.units import listed

Names = list[list[str]]  # parameter names of each update, including frozen ones; empty without updates


def names_of(config: Config, model: nn.Module) -> Names:
    """Each update's parameter names. Raises UserError as `matched` does, and for parameters in no update."""
    found = list(
        matched(model, {f"updates.{n}.parameters": own.parameters for n, own in enumerate(config.updates)}).values()
    )
    parameters = all_names(model)
    taken = {id(parameters[name]) for names in found for name in names}
    left = [name for name, p in parameters.items() if p.requires_grad and id(p) not in taken]
    if config.updates and left:
        raise UserError(
            f"updates: no update trains {listed(left)}; add them to the parameters of one, or to model.freeze"
        )
    return found


def with_one_optimizer(config: Config) -> list[Config]:
    """One configuration per optimizer, as if it were the only one: for code that reads `config.optimizer`."""
    if not config.updates:
        return [config]
    return [dataclasses.replace(config, optimizer=update.optimizer, updates=[]) for update in config.updates]


def with_one_loss(config: Config, components: Components) -> list[tuple[str, Config, Components]]:
    """(setting, config, components) for each trained loss, as if it were the only one.

    Raises UserError for an update whose batch is never cut.
    """
    if not config.updates:
        return [(f"task={config.task}", config, components)]
    for number, update in enumerate(config.updates):
        if needs_whole_batch(components.updates[update.name]):
            raise UserError(
                f"updates.{number}.task={update.task} has whole_batch=True, which needs a single optimizer: each "
                "update is cut separately; use a loss that is a sum over samples, or one of embeddings "
                "(trainapp.tasks.EmbeddingTask)"
            )
    return [
        (
            f"updates.{number}.task={update.task}",
            dataclasses.replace(config, task=update.task),
            dataclasses.replace(components, task=components.updates[update.name]),
        )
        for number, update in enumerate(config.updates)
    ]


def parameters_of(model: nn.Module, names: Names) -> list[list[nn.Parameter]]:
    """The parameters that each update trains."""
    parameters = all_names(model)
    unique = [dict.fromkeys(parameters[name] for name in own) for own in names]
    return [[parameter for parameter in own if parameter.requires_grad] for own in unique]


def build(
    config: Config,
    model: nn.Module,
    names: Names,
    precision: Precision,
    device: torch.device,
) -> list[Update]:
    """The updates, with their optimizers. Call once the model is spread over the ranks."""
    built = functools.partial(_optimizer, config, model, device)
    every = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not config.updates:
        return [Update(built("optimizer"), precision, parameters=every)]
    updates = []
    parts = zip(config.optimizers, config.updates, parameters_of(model, names), strict=True)
    for number, (setting, settings, own) in enumerate(parts):
        with trained_alone(own, every):
            optimizer = built(setting)
        # Each with its own loss scale.
        scaled = dataclasses.replace(precision, scaler=copy.deepcopy(precision.scaler))
        updates.append(Update(optimizer, scaled, settings.name, own, number=number, every=settings.every))
    return updates


def _optimizer(config: Config, model: nn.Module, device: torch.device, setting: str) -> torch.optim.Optimizer:
    settings = config.optimizers[setting]
    decay = settings.layer_decay
    blocks = blocks_of(model, f"{setting}.layer_decay={decay}") if decay is not None else []
    optimizer = build_optimizer(settings, model, device, config.user_packages, blocks, setting)
    if settings.in_backward:
        require_separable(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer
