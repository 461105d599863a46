"""Several optimizers (`updates`): the parameters of each, and their assembly.

A step is then one transaction per update, in order, on the same samples. Without `updates` it has only one, which
trains all parameters that require gradients.
"""

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import nn

from trainapp.assembly.components import Components
from trainapp.checkpoint.train_state import Update
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.losses.losses import needs_whole_batch
from trainapp.models.inspect import blocks_of
from trainapp.optim.optimizers import all_names, build_optimizer, matching, require_separable
from trainapp.optim.precision import Precision
from trainapp.parallel.strategy import trained_alone
from trainapp.units import listed

Names = list[list[str]]  # parameter names of each update, including frozen ones; empty without updates


def names_of(config: Config, model: nn.Module) -> Names:
    """Each update's parameter names. Raises UserError for a pattern that matches nothing, for parameters in two updates
    or in none, and for an update whose parameters are all frozen.
    """
    parameters, owner = all_names(model), type(model).__name__
    found: Names = []
    taken: dict[int, str] = {}
    for number, update in enumerate(config.updates):
        setting = f"updates.{number}.parameters="
        names = [n for p in update.parameters for n in matching(p, parameters, f"{setting}[{p}]", owner)]
        for name in names:
            other = taken.setdefault(id(parameters[name]), update.name)
            if other != update.name:
                raise UserError(
                    f"updates: {name} is among the parameters of {other} and of {update.name}; each is trained by one "
                    "optimizer, but may be used in the losses of the others"
                )
        if not any(parameters[name].requires_grad for name in names):
            raise UserError(f"updates.{number}: all parameters of {update.name} are frozen; remove the update")
        found.append(list(dict.fromkeys(names)))
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
    return [_trained(all_names(model), own) for own in names]


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
    for number, (setting, settings) in enumerate(zip(config.optimizers, config.updates, strict=True)):
        own = _trained(all_names(model), names[number])
        with trained_alone(own, every):
            optimizer = built(setting)
        scaled = precision.with_own_scaler(device)
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


def _trained(parameters: Mapping[str, nn.Parameter], names: list[str]) -> list[nn.Parameter]:
    own = {id(parameters[name]): parameters[name] for name in names}
    return [parameter for parameter in own.values() if parameter.requires_grad]
