"""The state of a model and of an optimizer as a checkpoint holds it, and a fresh one made ready to take it.

Tensors are those of the state dict themselves, whole or in shards: the checkpoint writes them, and fills them in place.
Everything else is plain values. Names are those of parameters, which survive regrouping and resharding.

torch's `set_optimizer_state_dict` is not used: it casts the optimizer's state to the dtype and the device of its
parameters (2.13, `Optimizer.load_state_dict`), and low-precision and offloaded states have others.
"""

import copy
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.checkpoint.plain import decoded, encoded
from trainapp.errors import UserError
from trainapp.models import adapters
from trainapp.optim.optimizers import step_without_effect
from trainapp.snapshot import has_extra_state
from trainapp.torch_private import EXTRA_STATE, MODULE_ATTRIBUTES, version_of

Sizes = dict[str, tuple[torch.Size, torch.dtype]]  # of saved tensors, by name
_OF_THE_LOOP = ("params", "lr", "initial_lr")  # set from the configuration in every step


class ModelState:
    """The state of one model. Made when the model has just been built: what differs later has changed in training."""

    def __init__(self, model: nn.Module):
        self.model = model
        base = adapters.base_of(model)
        self._frozen = frozenset() if base is None else base.names
        self._shapes = {name: tensor.shape for name, tensor in self._own()}
        self._versions = {name: (weakref.ref(tensor), version_of(tensor)) for name, tensor in self._own()}
        self._attributes = dict(_attributes(model))

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _has_changed(self, name: str, tensor: Tensor) -> bool:
        known = self._versions.get(name)
        return known is None or known[0]() is not tensor or known[1] != version_of(tensor)

    def written(self) -> list[str]:
        """Of a model with adapters: names in its frozen base, which a checkpoint does not hold, that forwards have
        written all the same, as those of a momentum teacher do.
        """
        own = dict(self.model.named_parameters())
        return sorted(name for name in self._frozen if name in own and self._has_changed(name, own[name]))

    def tensors(self, written: Collection[str] | None = None, without: Collection[str] = ()) -> dict[str, Tensor]:
        """The dense tensors of the state dict. One with several names, such as a tied weight, has the first.

        Not the frozen base of a model with adapters, but for what is `written` of it (None: on this rank), and not
        what `left_out` names, of this model (the default) or of one that was saved.
        """
        frozen = self._frozen.difference(self.written() if written is None else written)
        hidden = frozen | {*self.left_out(), *without}
        tensors, seen = {}, set()
        for name, value in self._entries():
            if _is_dense(value) and id(value) not in seen and name not in hidden:
                seen.add(id(value))
                tensors[name] = value.detach()
        return tensors

    def buffers(self) -> dict[str, Tensor]:
        """Buffers outside of the state dict (`persistent=False`), but for what is `left_out`."""
        others = {name for name, _ in self._entries()}.union(self.left_out())
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in others}

    def changed_buffers(self) -> dict[str, Tensor]:
        """Those of them that have changed since the model was built: constants need no place in a checkpoint."""
        return {name: buffer for name, buffer in self.buffers().items() if self._has_changed(name, buffer)}

    def values(self) -> dict[str, Any]:
        """What modules add to the state dict that is no dense tensor, in plain values."""
        return {
            name: encoded(value, f"{name} of the model's state dict")
            for name, value in self._entries()
            if not _is_dense(value)
        }

    def load_values(self, saved: dict[str, Any]) -> None:
        """Restore `values`, and copies that hooks make of tensors. Call when `tensors` are filled."""
        own = {id(tensor) for _, tensor in self._own()}
        entries = dict(self._entries()) | decoded(saved)
        if any(id(value) not in own for value in entries.values()):
            self.model.load_state_dict(entries, strict=False)  # without extra state, which has its own owner

    def left_out(self) -> list[str]:
        """Tensors that a fresh model does not have, or in another shape: those that a forward registers, fills or
        lets grow. Names that a fresh model has, and this one has no longer, too.
        """
        now = {name: tensor.shape for name, tensor in self._own()}
        moved = {name for name in now.keys() | self._shapes.keys() if now.get(name) != self._shapes.get(name)}
        return sorted(moved | {name for name, tensor in self._own() if _is_expanded(tensor)})

    def changed_attributes(self) -> list[str]:
        """Plain values and tensors in attributes of modules that have changed since the model was built, and that the
        modules put neither into the state dict nor into their extra state.
        """
        saved = {name for name, _ in self._entries()}
        now = {name: value for name, value in _attributes(self.model) if name not in saved}
        return sorted(name for name, value in now.items() if value != self._attributes.get(name))

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] != EXTRA_STATE:  # `Stateful` has it, of each rank
                yield name, value


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        own = {} if has_extra_state(module) else vars(module)
        for name, value in own.items():
            if name not in MODULE_ATTRIBUTES and isinstance(value, (bool, int, float, str, Tensor)):
                identity = (id(value), version_of(value)) if isinstance(value, Tensor) else value
                yield f"{path}.{name}" if path else name, identity


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, so that it cannot be filled."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if _is_dense(tensor) else ()
    return any(stride == 0 and size > 1 for size, stride in pairs)


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of each group's options. Those that later differ are the optimizer's state, and not configuration."""
    return [
        {name: _copied(value) for name, value in group.items() if name not in _OF_THE_LOOP}
        for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, (Tensor, np.ndarray, list, tuple, dict)) else value


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


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The tensors in the state of each parameter, by the parameter's name."""
    return {
        name: tensors
        for name, state in _by_name(model, optimizer).items()
        if (tensors := {key: value for key, value in state.items() if isinstance(value, Tensor)})
    }


def optimizer_values(model: nn.Module, optimizer: torch.optim.Optimizer, built: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything but `optimizer_tensors`, in plain values. built: the `options` of the optimizer as it was built.

    Raises UserError for what a checkpoint cannot hold.
    """
    state = _by_name(model, optimizer)
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        {name: value for name, value in now.items() if name not in before or not _same(value, before[name])}
        for now, before in zip(options(optimizer), built, strict=True)
    ]
    return {
        "kind": _kind(optimizer),
        "tensors": {name: [key for key, v in own.items() if isinstance(v, Tensor)] for name, own in state.items()},
        "state": {
            name: encoded({key: v for key, v in own.items() if not isinstance(v, Tensor)}, f"optimizer.state[{name!r}]")
            for name, own in state.items()
        },
        "shared": encoded(shared, "optimizer.state"),
        "groups": encoded(groups, "optimizer.param_groups"),
        "members": [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups],
    }


def prepare_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], sizes: Sizes, prefix: str
) -> None:
    """Give a fresh optimizer the structure of the saved one's state: tensors allocated, plain values filled in.

    saved: its `optimizer_values`. sizes: of its tensors, whose names begin with `prefix`. Raises UserError where it was
    saved by an optimizer of another kind.
    """
    if saved["kind"] != _kind(optimizer):
        raise UserError(
            f"its optimizer is {saved['kind']}, and this run's {_kind(optimizer)}; choose that one, or begin a new run "
            "with the weights alone by checkpointing.load=weights"
        )
    if len(optimizer.state) < sum(len(group["params"]) for group in optimizer.param_groups):
        step_without_effect(optimizer)
    for name, parameter in model.named_parameters():
        own = optimizer.state.pop(parameter, {})
        if name in saved["state"]:  # else it has had no gradient yet
            tensors = {
                key: _tensor(own.get(key), *sizes[f"{prefix}.{name}.{key}"], parameter)
                for key in saved["tensors"][name]
                if f"{prefix}.{name}.{key}" in sizes
            }
            optimizer.state[parameter] = decoded(saved["state"][name], parameter.device) | tensors
    optimizer.state.update(decoded(saved["shared"]))
    changed = {name: own for names, own in zip(saved["members"], saved["groups"], strict=True) for name in names}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group.update(decoded(changed.get(names[id(group["params"][0])], {}), group["params"][0].device))


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Raises UserError for the state of a parameter that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {key: state for key, state in optimizer.state.items() if isinstance(key, Tensor)}
    lost = [parameter for parameter in states if id(parameter) not in names]
    if lost:
        raise UserError(
            f"the optimizer trains {len(lost)} parameters that are no longer the model's, the first of shape "
            f"{tuple(lost[0].shape)}: the model has replaced them; write into a parameter instead, with copy_"
        )
    return {names[id(parameter)]: state for parameter, state in states.items()}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Its class, and the form of its state where that is not a tensor of values."""
    form = getattr(optimizer, "state_form", "")
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}{f' ({form})' * bool(form)}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is b or (type(a) is type(b) and bool(np.all(a == b)))


def _tensor(own: Tensor | None, shape: torch.Size, dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """The tensor to read into: the existing one, or a new one laid out as its parameter where it has that shape."""
    if own is not None and own.shape == shape:
        return own
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)
