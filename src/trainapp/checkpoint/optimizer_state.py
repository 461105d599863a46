"""The state of optimizers as stored in checkpoints, and preparing fresh optimizers to load it.

State is stored under parameters' names, which survive regrouping and resharding. torch's `set_optimizer_state_dict` is
not used: it casts the optimizer's state to the dtype and device of its parameters (2.13, `Optimizer.load_state_dict`),
but low-precision and offloaded states have others.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.checkpoint.plain_values import decoded, encoded
from trainapp.checkpoint.shards import Sizes
from trainapp.errors import UserError
from trainapp.optim.optimizers import step_without_effect

_SET_IN_EVERY_STEP = ("params", "lr", "initial_lr")  # from the configuration, by the loop
_MUTABLE = (Tensor, np.ndarray, list, tuple, dict)


def require_loadable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for an optimizer with its own `state_dict`: a checkpoint holds only `state` and `param_groups`,
    and would lose the rest.
    """
    kind = type(optimizer)
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise UserError(
            f"optimizer={kind.__name__}: its own state_dict() is not called; a checkpoint holds only `state` "
            "and `param_groups`: keep everything there, or train with checkpointing=off"
        )


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of each group's options. Later differences are the optimizer's state, not configuration."""
    options_by_group = []
    for group in optimizer.param_groups:
        options = {}
        for name, value in group.items():
            if name in _SET_IN_EVERY_STEP:
                continue
            if isinstance(value, _MUTABLE):
                value = copy.deepcopy(value)
            options[name] = value
        options_by_group.append(options)
    return options_by_group


# --- saving


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the tensors in the state of each parameter, by the parameter's name."""
    return {name: _tensors_in(state) for name, state in _state_by_name(model, optimizer).items()}


def optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer, built_options: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return everything except `optimizer_tensors`, as plain values.

    Raises UserError for values that a checkpoint cannot hold.

    Args:
        model: the model with the optimizer's parameters.
        optimizer: the optimizer.
        built_options: the `group_options` of the newly built optimizer.
    """
    # The state of each parameter: only the keys of its tensors, which are saved elsewhere, and its other values.
    tensor_keys = {}
    values_by_name = {}
    for name, state in _state_by_name(model, optimizer).items():
        tensor_keys[name] = list(_tensors_in(state))
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        values_by_name[name] = encoded(values, f"optimizer.state[{name!r}]")

    # State that belongs to no parameter.
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}

    # Which parameters are in which group.
    parameter_names = _names_by_id(model)
    members = []
    for group in optimizer.param_groups:
        members.append([parameter_names.get(id(parameter), "") for parameter in group["params"]])
    return {
        "kind": _kind(optimizer),
        "tensors": tensor_keys,
        "state": values_by_name,
        "shared": encoded(shared, "optimizer.state"),
        "groups": encoded(_changed_options(optimizer, built_options), "optimizer.param_groups"),
        "members": members,
    }


def _changed_options(optimizer: torch.optim.Optimizer, built_options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each group, the options that differ from those of the newly built optimizer."""
    changed_by_group = []
    for options, built in zip(group_options(optimizer), built_options, strict=True):
        changed = {}
        for name, value in options.items():
            if name not in built or not _is_equal(value, built[name]):
                changed[name] = value
        changed_by_group.append(changed)
    return changed_by_group


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if a is b:
        return True
    return type(a) is type(b) and bool(np.all(a == b))


# --- loading


def prepare_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], sizes: Sizes, prefix: str
) -> None:
    """Give a fresh optimizer the structure of the saved one's state: tensors allocated, plain values filled in.

    Raises UserError if it was saved by another kind of optimizer.

    Args:
        model: the model with the optimizer's parameters.
        optimizer: the fresh optimizer.
        saved: the saved one's `optimizer_values`.
        sizes: shapes and dtypes of its tensors.
        prefix: the beginning of their names.
    """
    if saved["kind"] != _kind(optimizer):
        raise UserError(
            f"it was saved with {saved['kind']}, but this run has {_kind(optimizer)}; use that one, or start a new "
            "run from the weights alone with model.init_from=RUN"
        )

    # Let it allocate its state, in its own dtypes and on its own devices, where it does so in its first step.
    parameter_count = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(optimizer.state) < parameter_count:
        step_without_effect(optimizer)

    # Give each parameter the saved values, and tensors to read the saved ones into.
    for name, parameter in model.named_parameters():
        fresh_state = optimizer.state.pop(parameter, {})
        if name in saved["state"]:  # otherwise it had no gradient yet
            state = decoded(saved["state"][name], parameter.device)
            for key in saved["tensors"][name]:
                tensor_name = f"{prefix}.{name}.{key}"
                if tensor_name in sizes:
                    shape, dtype = sizes[tensor_name]
                    state[key] = _tensor_to_fill(fresh_state.get(key), shape, dtype, parameter)
            optimizer.state[parameter] = state

    optimizer.state.update(decoded(saved["shared"]))
    _load_options(model, optimizer, saved)


def _tensor_to_fill(fresh: Tensor | None, shape: torch.Size, dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """Return the tensor to read into: the fresh optimizer's, or a new one, laid out like its parameter if the shapes
    are equal.
    """
    if fresh is not None and fresh.shape == shape:
        return fresh
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _load_options(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore the options that had changed. A group has those that its first parameter had."""
    changed_by_name = {}
    for names, changed in zip(saved["members"], saved["groups"], strict=True):
        for name in names:
            changed_by_name[name] = changed

    parameter_names = _names_by_id(model)
    for group in optimizer.param_groups:
        first_parameter = group["params"][0]
        changed = changed_by_name.get(parameter_names[id(first_parameter)], {})
        group.update(decoded(changed, first_parameter.device))


# --- both


def _state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state by parameter name. Raises UserError for a parameter that is not the model's."""
    parameter_names = _names_by_id(model)
    states = {key: state for key, state in optimizer.state.items() if isinstance(key, Tensor)}

    foreign = [parameter for parameter in states if id(parameter) not in parameter_names]
    if foreign:
        raise UserError(
            f"the optimizer trains {len(foreign)} parameters that are no longer the model's, the first of shape "
            f"{tuple(foreign[0].shape)}: the model has replaced them; write into a parameter instead, with copy_"
        )
    return {parameter_names[id(parameter)]: state for parameter, state in states.items()}


def _names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the names of the model's parameters."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _tensors_in(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's class, and the form of its state if that is not plain values."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    state_form = getattr(optimizer, "state_form", "")
    if state_form:
        kind += f" ({state_form})"
    return kind
