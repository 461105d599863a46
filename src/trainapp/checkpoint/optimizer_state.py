"""The state of any optimizer: what `optimizer.state` and the groups' options hold, tensors or not.

By parameter name, which survives regrouping and resharding. Tensors go into the shards; everything else is plain
values: step counts, lists, None, and options of a group that the optimizer itself changes as it steps.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.checkpoint.model_state import Sizes
from trainapp.checkpoint.plain import decoded, digest, encoded
from trainapp.errors import UserError
from trainapp.optim.optimizers import step_without_effect
from trainapp.units import listed

_OF_THE_LOOP = ("params", "lr", "initial_lr")  # set from the configuration in every step


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each group's options, for `plain.digest` to compare. Those that later differ are the optimizer's state."""
    return [
        {name: encoded(value, name, strict=False) for name, value in group.items() if name not in _OF_THE_LOOP}
        for group in optimizer.param_groups
    ]


def require_loadable(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for an optimizer with a `state_dict` of its own: a checkpoint holds `state` and `param_groups`,
    and would lose what else is in it.
    """
    kind = type(optimizer)
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise UserError(
            f"optimizer={kind.__name__}: its own state_dict() is not called; a checkpoint holds only `state` "
            "and `param_groups`: keep everything there, or train with checkpointing=off"
        )


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The state of each parameter by its name, with all that is no tensor in it.

    Raises UserError for a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lost = [parameter for parameter, _ in _by_parameter(optimizer) if id(parameter) not in names]
    if lost:
        raise UserError(
            f"the optimizer trains {len(lost)} parameters that are no longer the model's, the first of shape "
            f"{tuple(lost[0].shape)}: the model has replaced them; write into a parameter instead, with copy_"
        )
    return {names[id(parameter)]: state for parameter, state in _by_parameter(optimizer)}


def values(model: nn.Module, optimizer: torch.optim.Optimizer, built: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything but the tensors of `tensors`, in plain values. built: the `options` of the optimizer as it was built.

    Raises UserError for what a checkpoint cannot hold.
    """
    by_name = tensors(model, optimizer)
    paths = {
        name: sorted(([*path, t.device.type] for path, t in _leaves(state)), key=str) for name, state in by_name.items()
    }
    state = {name: _without_tensors(state) for name, state in by_name.items()}
    shared = {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)}
    groups = [
        {name: group[name] for name in now if name not in before or digest(now[name]) != digest(before[name])}
        for group, now, before in zip(optimizer.param_groups, options(optimizer), built, strict=True)
    ]
    return {
        "class": _class(optimizer),
        "tensors": encoded(paths, "optimizer.state"),
        "state": encoded(state, "optimizer.state"),
        "shared": encoded(shared, "optimizer.state"),
        "groups": encoded(groups, "optimizer.param_groups"),
    } | ({"members": _members(model, optimizer)} if any(groups) else {})


def follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    sizes: Sizes,
    device: torch.device,
    prefix: str = "optimizer",
) -> list[str]:
    """Make the optimizer's state that of the saved one: plain values filled in, tensors allocated.

    A state that exists already is used where it fits. prefix: of its tensors' names in `sizes`. Returns the names that
    differ, where the saved state is another optimizer's.
    """
    _allocate(optimizer)
    same_class = saved["class"] == _class(optimizer)
    differences: list[str] = []
    for name, parameter in model.named_parameters():
        own = optimizer.state.get(parameter, {})
        paths = {tuple(path): kind for *path, kind in decoded(saved["tensors"].get(name, ()))}
        plain = decoded(saved["state"].get(name), parameter.device)
        own_keys = {*own}
        saved_keys = {*(plain or ()), *(path[0] for path in paths)}
        lacking = own_keys - saved_keys if plain is not None or not same_class else set()
        unknown = set() if same_class else saved_keys - own_keys
        differences += [f"{prefix}.{name}.{key}" for key in sorted(lacking | unknown, key=str)]
        if plain is None:
            optimizer.state.pop(parameter, None)  # it has had no gradient yet
            continue
        leaves = dict(_leaves(own))
        for path, kind in paths.items():
            size = sizes.get(".".join(map(str, (prefix, name, *path))))
            if size is not None:
                _put(plain, path, _tensor(leaves.get(path), size, kind, parameter))
        optimizer.state[parameter] = plain
    optimizer.state.update(decoded(saved["shared"], device))
    return differences + _follow_options(model, optimizer, saved, device)


def _follow_options(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], device: torch.device
) -> list[str]:
    """Give each group the options that its optimizer had changed as it stepped. Returns what differs, where groups of
    other parameters had different ones.
    """
    if not any(saved["groups"]):
        return []
    now = _members(model, optimizer)
    before = saved.get("members", now)  # an older checkpoint does not have them
    if len(before) != len(saved["groups"]):
        return [f"{len(saved['groups'])} parameter groups instead of {len(now)}"]
    by_members = {tuple(sorted(names)): changed for names, changed in zip(before, saved["groups"], strict=True)}
    are_alike = len({digest(changed) for changed in saved["groups"]}) == 1
    if not are_alike and any(tuple(sorted(names)) not in by_members for names in now):
        gone, new = _changed_members(before, now)
        groups = (listed(" ".join(names) for names in some) or "none" for some in (new, gone))
        return ["the optimizer's groups ({}) instead of ({}), whose options it had changed".format(*groups)]
    for group, names in zip(optimizer.param_groups, now, strict=True):
        group.update(decoded(by_members.get(tuple(sorted(names)), saved["groups"][0]), device))
    return []


def _changed_members(saved: list[list[str]], own: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Of two lists of groups, each with the names of its parameters: those that only the first has, and vice versa."""
    before, now = [sorted(group) for group in saved], [sorted(group) for group in own]
    return [group for group in before if group not in now], [group for group in now if group not in before]


def _members(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of each group's parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """The state that a first step would create, without a trace in the groups' options."""
    if len(optimizer.state) < sum(len(group["params"]) for group in optimizer.param_groups):
        step_without_effect(optimizer)


def _class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _by_parameter(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for key, state in optimizer.state.items():
        if isinstance(key, Tensor):
            yield key, state


def _leaves(state: dict[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in nested dicts, with their keys."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        elif isinstance(value, Tensor):
            yield (*path, key), value


def _without_tensors(state: dict[Any, Any]) -> dict[Any, Any]:
    kept = state.copy()  # of the same class
    for key, value in state.items():
        if isinstance(value, Tensor):
            del kept[key]
        elif isinstance(value, dict):
            kept[key] = _without_tensors(value)
    return kept


def _put(state: dict[Any, Any], path: tuple[Any, ...], tensor: Tensor) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = tensor


def _tensor(own: Tensor | None, size: tuple[torch.Size, torch.dtype], kind: str, parameter: Tensor) -> Tensor:
    """The tensor to read into: the existing one, or a new one laid out as its parameter where it has that shape."""
    shape, dtype = size
    if own is not None and own.shape == shape:
        return own
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else parameter.device)
