"""Builds the optimizer: its groups, the fused kernel where available, state allocated before the first step."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config import targets
from trainapp.config.schema import Config, Optimizer
from trainapp.errors import UserError
from trainapp.optim import groups as own_groups
from trainapp.optim.on_host import HostCopies, move_to_host
from trainapp.torch_private import step_optimizer

_FUSED_DEVICES = ("cuda", "cpu", "mps")

# Wording of memory errors, which do not mean that a fused kernel is missing. Incomplete on purpose (`memory.detection`
# has the full list): a miss costs only the fused kernel.
_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC\w*_FAILED", re.IGNORECASE)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights with two or more dimensions decay, norms and biases (at most one dimension) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    settings: Optimizer,
    model: nn.Module,
    device: torch.device,
    user_packages: Sequence[str],
    blocks: Sequence[nn.Module] = (),
    setting: str = "optimizer",
) -> torch.optim.Optimizer:
    """The optimizer of the parameters that require gradients, with its state already allocated: the first step needs no
    more memory than later ones.

    blocks: of the model, for `layer_decay`. setting: where the settings are from, for messages.
    Raises UserError for a class that is not allowed, for arguments that it does not take, and for groups that do not
    fit (`optim.groups`).
    """
    kind = targets.locate(settings.target, f"{setting}._target_", user_packages)
    takes = inspect.signature(kind).parameters
    arguments = dict(settings.arguments)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model: {type(model).__name__} has no parameter that requires a gradient, so there is nothing to train; "
            "leave some parameters unfrozen"
        )
    if settings.fused is True and "fused" not in takes:
        raise UserError(f"{setting}.fused=true: {settings.target} has no fused kernel; use {setting}.fused=auto")
    is_auto, place = settings.fused == "auto", "cpu" if settings.offload else device.type
    # The fused kernel leaves dampened momentum unwritten when the first step overflows, and `materialise_state` cannot
    # create it beforehand.
    can_be_fused = "fused" in takes and not arguments.get("dampening")
    if is_auto and not _is_known(kind) and any(hasattr(p, "device_mesh") for p in model.parameters()):
        can_be_fused = False  # of shards, not every kernel exists, and only a step that is tried below would tell

    def ready(arguments: dict[str, Any]) -> torch.optim.Optimizer:
        # Made anew because an optimizer writes its settings into the groups that it is given.
        groups = _groups(kind, settings, model, blocks, setting)
        copies = HostCopies() if settings.offload else None
        provided: dict[str, Any] = {"params": groups if copies is None else copies.of_groups(groups)}
        provided |= {} if settings.lr is None else {"lr": settings.lr}
        optimizer = targets.construct(kind, arguments, setting, user_packages, provided)
        own_groups.require_known(settings, optimizer, setting)
        _allocate_state(optimizer, settings, setting)
        if copies is not None:
            move_to_host(optimizer, copies)
        return optimizer

    if can_be_fused and (place in _FUSED_DEVICES if is_auto else settings.fused):
        try:
            return ready({**arguments, "fused": True})
        except UserError as error:
            if not is_auto or _MEMORY.search(str(error.__cause__)):
                raise  # else: torch has no such kernel for these parameters, as SGD's for shards of FSDP2
    return ready(arguments)


def _groups(kind: Any, settings: Optimizer, model: nn.Module, blocks: Sequence[nn.Module], setting: str) -> list[Any]:
    """What the optimizer's constructor gets: parameter groups, or parameters where nothing tells them apart."""
    groups: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if "weight_decay" in inspect.signature(kind).parameters:
        # An optimizer may treat some parameters in another way.
        groups = getattr(kind, "parameter_groups", parameter_groups)(model, settings.weight_decay)
    if settings.groups or settings.layer_decay is not None:
        groups = own_groups.split(groups, model, settings, kind, blocks, setting)
    return groups


def lean_optimizer(config: Config, optimizer: torch.optim.Optimizer, update: int = 0) -> tuple[Config, bool]:
    """The configuration with `foreach=false` where that saves memory, and whether it does. update: the optimizer's.

    The foreach kernels allocate a further copy of the parameters in the step; the fused ones and the plain loop do not.
    """
    group = optimizer.param_groups[0]
    settings = list(config.optimizers.values())[update]
    on_device = not settings.offload and any(p.device.type != "cpu" for p in group["params"])
    uses_foreach = group.get("foreach") or (group.get("foreach", False) is None and on_device)
    if not uses_foreach or group.get("fused"):
        return config, False
    lean = dataclasses.replace(settings, arguments={**settings.arguments, "foreach": False})
    if not config.updates:
        return dataclasses.replace(config, optimizer=lean), True
    updates = list(config.updates)
    updates[update] = dataclasses.replace(updates[update], optimizer=lean)
    return dataclasses.replace(config, updates=updates), True


# --- state before the first step


def _allocate_state(optimizer: torch.optim.Optimizer, settings: Optimizer, setting: str) -> None:
    try:
        materialise_state(optimizer)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:  # LBFGS needs a closure, SparseAdam sparse gradients
        optimizer.zero_grad(set_to_none=True)
        raise UserError(
            f"{setting}._target_={settings.target}: it cannot take a plain step on this model's gradients ({error}); "
            "choose another"
        ) from error


def materialise_state(optimizer: torch.optim.Optimizer) -> bool:
    """Allocate the state that torch's optimizers otherwise create in their first step. Whether that was possible.

    It is not where the state is not zero after a step without effect (Rprop's step sizes), for SGD's dampened momentum,
    which treats the first step differently, nor for optimizers that neither torch nor trainapp ships.
    """
    if not _is_known(type(optimizer)):
        return False
    if optimizer.state:  # created by the constructor, as in Adagrad
        return True
    if hasattr(optimizer, "allocate_state"):  # trainapp's own: a step of theirs is many operations
        optimizer.allocate_state()
        return True
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        return False
    step_without_effect(optimizer)
    values = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    # As bool, since `any` of uint8 is uint8, and a plan answers reads by their dtype.
    clean = not any(torch.is_tensor(value) and value.any().bool() for name, value in values if name != "step")
    if not clean:
        optimizer.state.clear()
    return clean


def _is_known(kind: Any) -> bool:
    """Whether torch or trainapp ships this class: of others, nothing is known of what a step changes."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] in ("torch", "trainapp")


@torch.no_grad()
def step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """A step with zero gradients, rate and decay, which changes no parameter. Step counts are reset to zero.

    Leaves the optimizer's state allocated, ready to load a checkpoint into.
    """
    kept = [_options(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        if group.get("weight_decay"):
            group["weight_decay"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, kept, strict=True):  # some optimizers count in their options
        for name in group.keys() - values.keys() - {"params"}:
            del group[name]
        group.update(values)
    for state in optimizer.state.values():
        if isinstance(state, dict) and "step" in state:
            state["step"] = state["step"].zero_() if torch.is_tensor(state["step"]) else 0


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group's options, as far as they can change in place."""
    copies: dict[type, Callable[[Any], Any]] = {torch.Tensor: torch.clone, list: list, dict: dict}
    own = {name: value for name, value in group.items() if name != "params"}
    return {name: copies[type(value)](value) if type(value) in copies else value for name, value in own.items()}


# --- one parameter at a time, as its gradient is complete: LOMO's method (arXiv:2306.09782), with any optimizer whose
# update of a parameter needs no other gradient than that parameter's


def require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for an optimizer that may need several gradients at once, or count its calls."""
    kind = type(optimizer)
    if not (_is_known(kind) or getattr(kind, "updates_parameters_alone", False)):
        raise UserError(
            f"optimizer.in_backward=true with {kind.__name__}: it is called once per parameter, and may need all "
            "gradients at once; if it does not, say so with `updates_parameters_alone = True` in its class, else use "
            "optimizer.in_backward=false"
        )


def step_alone(optimizer: torch.optim.Optimizer, parameter: Tensor, own: dict[str, Any]) -> None:
    """Update this parameter alone. own: the group that it is in."""
    groups = optimizer.param_groups
    all_parameters = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [parameter] if group is own else []
    try:
        step_optimizer(optimizer)
    finally:
        for group, parameters in zip(groups, all_parameters, strict=True):
            group["params"] = parameters
