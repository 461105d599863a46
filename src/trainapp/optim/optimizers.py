"""Builds the optimizer: parameter groups, the fused kernel where there is one, state made before the first step."""

import dataclasses
import inspect
from collections.abc import Sequence

import torch
from torch import nn

from trainapp.config import schema, targets
from trainapp.errors import UserError

_FUSED_DEVICES = ("cuda", "cpu", "mps")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: weights of two or more dimensions decay, norms and biases (one dimension or none) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    settings: schema.Optimizer, model: nn.Module, device: torch.device, user_packages: Sequence[str]
) -> torch.optim.Optimizer:
    """The optimizer with its state already in memory, so that the first step meets no surprise.

    Raises UserError for a class that is not allowed, or for arguments that it does not take.
    """
    kind = targets.locate(settings.target, "optimizer._target_", user_packages)
    takes = inspect.signature(kind).parameters
    arguments = dict(settings.arguments)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    fused = settings.fused if settings.fused != "auto" else device.type in _FUSED_DEVICES
    # An overflow in the first step leaves the fused kernel's momentum unwritten, and this one is not made beforehand.
    unwritten = arguments.get("momentum") and arguments.get("dampening")
    if "fused" in takes and fused and not unwritten:
        arguments["fused"] = True
    groups = parameter_groups(model, settings.weight_decay) if "weight_decay" in takes else list(model.parameters())
    provided = {"params": groups, "lr": settings.lr}
    optimizer = targets.construct(kind, arguments, "optimizer", user_packages, provided)
    try:
        materialise_state(optimizer)
    except (RuntimeError, TypeError) as error:  # LBFGS wants a closure, SparseAdam sparse gradients
        raise UserError(
            f"optimizer._target_={settings.target}: it cannot take a plain step on this model's gradients ({error}); "
            "choose another"
        ) from None
    return optimizer


def lean_optimizer(settings: schema.Config, optimizer: torch.optim.Optimizer) -> tuple[schema.Config, bool]:
    """The configuration with `foreach=false` where that would remove temporaries, and whether it would.

    The foreach kernels need one more copy of the parameters during the step; the fused ones and the plain loop do not.
    """
    group = optimizer.param_groups[0]
    on_device = any(p.device.type != "cpu" for p in group["params"])
    uses_foreach = group.get("foreach") or (group.get("foreach", False) is None and on_device)
    if not uses_foreach or group.get("fused"):
        return settings, False
    arguments = {**settings.optimizer.arguments, "foreach": False}
    return dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, arguments=arguments)), True


def materialise_state(optimizer: torch.optim.Optimizer) -> bool:
    """Make the state that torch's optimizers otherwise make inside their first step. True if it was done.

    Whoever keeps anything else than zeros after a step that changes nothing (Rprop's step sizes, SGD's dampened
    momentum, which treats its first step apart) is left to make its state by itself, as are optimizers that torch
    does not ship.
    """
    if type(optimizer).__module__.partition(".")[0] != "torch":
        return False
    if optimizer.state:  # made by its constructor, as Adagrad's is
        return True
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        return False
    step_without_effect(optimizer)
    values = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    clean = not any(torch.is_tensor(value) and value.any() for name, value in values if name != "step")
    if not clean:
        optimizer.state.clear()
    return clean


@torch.no_grad()
def step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """A step with zero gradients, a rate of zero and no decay changes no parameter; step counts are set back to zero.

    All that is left of it is the optimizer's state: to have it in memory, or to load a checkpoint's into.
    """
    kept = [{name: group.get(name) for name in ("lr", "weight_decay")} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        if group.get("weight_decay"):
            group["weight_decay"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update({name: value for name, value in values.items() if name in group})
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].zero_() if torch.is_tensor(state["step"]) else 0
