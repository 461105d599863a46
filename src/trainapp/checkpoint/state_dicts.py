"""The state of models, optimizers and other objects as stored in checkpoints, and preparing fresh objects to load it.

Tensors are the state dict's own, whole or sharded: the checkpoint writes them, and fills them in place. Everything else
is plain values, which `torch.load(weights_only=True)` reads without executing code: numbers, strings, tensors, and
dicts, lists, tuples and sets of them. NumPy arrays and scalars are stored as tensors. Names are parameters' names,
which survive regrouping and resharding.

torch's `set_optimizer_state_dict` is not used: it casts the optimizer's state to the dtype and device of its parameters
(2.13, `Optimizer.load_state_dict`), but low-precision and offloaded states have others.
"""

import copy
import hashlib
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.errors import UserError, add_note
from trainapp.models import adapters
from trainapp.optim.optimizers import step_without_effect
from trainapp.parallel.ranks import Ranks
from trainapp.state.stateful import Stateful, has_extra_state, is_expanded
from trainapp.torch_private import EXTRA_STATE, MODULE_ATTRIBUTES, strided_parts, version_of

Sizes = dict[str, tuple[torch.Size, torch.dtype]]  # shape and dtype of saved tensors, by name
_OF_THE_LOOP = ("params", "lr", "initial_lr")  # set from the configuration in every step
_ARRAY, _SCALAR = "trainapp.array", "trainapp.scalar"  # the only key of a dict that stands for one
_LEAVES = (type(None), bool, int, float, complex, str, torch.dtype, torch.Size)
_SEQUENCES, _DICTS = (list, tuple, set), (dict, OrderedDict, Counter)


class ModelState:
    """The state of one model. Create it for a newly built model: later differences are training's changes."""

    def __init__(self, model: nn.Module):
        self.model = model
        base = adapters.base_of(model)
        self._frozen = frozenset() if base is None else base.names
        self._built = {name: (t.shape, weakref.ref(t), version_of(t)) for name, t in self._own()}
        self._attributes = dict(_attributes(model))

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] != EXTRA_STATE:  # `Stateful` saves it per rank
                yield name, value

    def _has_changed(self, name: str, tensor: Tensor) -> bool:
        _, built, version = self._built.get(name, (None, lambda: None, 0))
        return built() is not tensor or version != version_of(tensor)

    def values(self, ranks: Ranks) -> dict[str, Any]:
        """What a checkpoint holds besides `tensors`, as plain values; equal on all ranks except `entries`. Collective.

        entries: what modules add to the state dict other than dense tensors. left_out: see `left_out`. written: of a
        model with adapters, names in its frozen base that forwards have written nevertheless, as with a momentum
        teacher.
        """
        others = {name: value for name, value in self._entries() if not _is_dense(value)}
        named = self.model.named_parameters()
        written = [name for name, own in named if name in self._frozen and self._has_changed(name, own)]
        return {
            "entries": {name: encoded(value, f"{name} of the model's state dict") for name, value in others.items()},
            "left_out": self.left_out(),
            "written": sorted({name for names in ranks.all_gather_object(written) for name in names}),
        }

    def tensors(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """The dense tensors of the state dict. A tensor with several names, such as a tied weight, has the first.

        values: the `values` saved with them. Excludes everything that is `left_out` now or was then, and the frozen
        base of a model with adapters, except what is `written`.
        """
        base = self._frozen.difference(values["written"])
        seen = {id(own) for name, own in self.model.named_parameters() if name in base}
        tensors, left_out = {}, {*self.left_out(), *values["left_out"]}
        for name, value in self._entries():
            if _is_dense(value) and id(value) not in seen and name not in left_out:
                seen.add(id(value))
                tensors[name] = value.detach()
        return tensors

    def buffers(self, saved: Sizes | None = None) -> dict[str, Tensor]:
        """Buffers outside of the state dict (`persistent=False`): those that have changed since the model was built, or
        the `saved` ones.
        """
        others = {name for name, _ in self._entries()}.union(self.left_out())
        outside = {name: buffer for name, buffer in self.model.named_buffers() if name not in others}
        if saved is None:
            return {name: buffer for name, buffer in outside.items() if self._has_changed(name, buffer)}
        shapes = {name: shape for name, (shape, _) in saved.items()}
        return {name: buffer for name, buffer in outside.items() if shapes.get(f"buffers.{name}") == buffer.shape}

    def load_values(self, saved: dict[str, Any]) -> None:
        """Restore `values`, and copies that hooks make of tensors. Call after filling `tensors`."""
        own = {id(tensor) for _, tensor in self._own()}
        entries = dict(self._entries()) | decoded(saved["entries"])
        if any(id(value) not in own for value in entries.values()):
            self.model.load_state_dict(entries, strict=False)  # without extra state, which has its own owner

    def left_out(self) -> list[str]:
        """Tensors that a fresh model lacks or has in another shape (a forward registers, fills or grows them), and
        names that a fresh model has but this one no longer.
        """
        now, built = {name: t.shape for name, t in self._own()}, {name: of[0] for name, of in self._built.items()}
        moved = {name for name in now.keys() | built.keys() if now.get(name) != built.get(name)}
        return sorted(moved | {name for name, tensor in self._own() if is_expanded(tensor)})

    def not_saved(self) -> list[str]:
        """Changes by training that a checkpoint does not hold: `left_out`, and plain values and tensors in attributes
        of modules that are neither in the state dict nor in their extra state.
        """
        saved = {name for name, _ in self._entries()}
        now = {name: value for name, value in _attributes(self.model) if name not in saved}
        return self.left_out() + sorted(name for name, value in now.items() if value != self._attributes.get(name))


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Not those of Transformers' own modules, nor results that a forward leaves for the loss."""
    for path, module in model.named_modules():
        own = {} if has_extra_state(module) or type(module).__module__.startswith("transformers.") else vars(module)
        for name, value in own.items():
            is_value = isinstance(value, (bool, int, float, str, Tensor)) and getattr(value, "grad_fn", None) is None
            if name not in MODULE_ATTRIBUTES and is_value:
                identity = (id(value), version_of(value)) if isinstance(value, Tensor) else value
                yield f"{path}.{name}" if path else name, identity


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


# --- optimizers


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of each group's options. Later differences are the optimizer's state, not configuration."""
    kinds = (Tensor, np.ndarray, list, tuple, dict)
    return [
        {n: copy.deepcopy(v) if isinstance(v, kinds) else v for n, v in group.items() if n not in _OF_THE_LOOP}
        for group in optimizer.param_groups
    ]


def require_loadable(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for an optimizer with its own `state_dict`: a checkpoint holds only `state` and `param_groups`,
    and would lose the rest.
    """
    kind = type(optimizer)
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise UserError(
            f"optimizer={kind.__name__}: its own state_dict() is not called; a checkpoint holds only `state` "
            "and `param_groups`: keep everything there, or train with checkpointing=off"
        )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The tensors in the state of each parameter, by the parameter's name."""
    return {name: _tensors_in(state) for name, state in _by_name(model, optimizer).items()}


def optimizer_values(model: nn.Module, optimizer: torch.optim.Optimizer, built: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything except `optimizer_tensors`, as plain values. built: the `options` of the newly built optimizer.

    Raises UserError for values that a checkpoint cannot hold.
    """
    state = _by_name(model, optimizer)
    plain = {name: {key: v for key, v in own.items() if not isinstance(v, Tensor)} for name, own in state.items()}
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    names = _names(model)
    groups = [
        {name: value for name, value in now.items() if name not in before or not _same(value, before[name])}
        for now, before in zip(options(optimizer), built, strict=True)
    ]
    return {
        "kind": _kind(optimizer),
        "tensors": {name: list(_tensors_in(own)) for name, own in state.items()},
        "state": {name: encoded(own, f"optimizer.state[{name!r}]") for name, own in plain.items()},
        "shared": encoded(shared, "optimizer.state"),
        "groups": encoded(groups, "optimizer.param_groups"),
        "members": [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups],
    }


def prepare_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], sizes: Sizes, prefix: str
) -> None:
    """Give a fresh optimizer the structure of the saved one's state: tensors allocated, plain values filled in.

    saved: its `optimizer_values`. sizes: shapes and dtypes of its tensors, whose names start with `prefix`. Raises
    UserError if it was saved by another kind of optimizer.
    """
    if saved["kind"] != _kind(optimizer):
        raise UserError(
            f"it was saved with {saved['kind']}, but this run has {_kind(optimizer)}; use that one, or start a new "
            "run from the weights alone with model.init_from=RUN"
        )
    if len(optimizer.state) < sum(len(group["params"]) for group in optimizer.param_groups):
        step_without_effect(optimizer)
    for name, parameter in model.named_parameters():
        own = optimizer.state.pop(parameter, {})
        if name in saved["state"]:  # otherwise it had no gradient yet
            tensors = {
                key: _tensor(own.get(key), *sizes[f"{prefix}.{name}.{key}"], parameter)
                for key in saved["tensors"][name]
                if f"{prefix}.{name}.{key}" in sizes
            }
            optimizer.state[parameter] = decoded(saved["state"][name], parameter.device) | tensors
    optimizer.state.update(decoded(saved["shared"]))
    changed = {name: own for names, own in zip(saved["members"], saved["groups"], strict=True) for name in names}
    names = _names(model)
    for group in optimizer.param_groups:
        group.update(decoded(changed.get(names[id(group["params"][0])], {}), group["params"][0].device))


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name. Raises UserError for a parameter that is not the model's."""
    names = _names(model)
    states = {key: state for key, state in optimizer.state.items() if isinstance(key, Tensor)}
    lost = [parameter for parameter in states if id(parameter) not in names]
    if lost:
        raise UserError(
            f"the optimizer trains {len(lost)} parameters that are no longer the model's, the first of shape "
            f"{tuple(lost[0].shape)}: the model has replaced them; write into a parameter instead, with copy_"
        )
    return {names[id(parameter)]: state for parameter, state in states.items()}


def _names(model: nn.Module) -> dict[int, str]:
    """The names of parameters, by id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _tensors_in(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class, and the form of its state if that is not plain values."""
    form = getattr(optimizer, "state_form", "")
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}{f' ({form})' * bool(form)}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is b or (type(a) is type(b) and bool(np.all(a == b)))


def _tensor(own: Tensor | None, shape: torch.Size, dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """The tensor to read into: the existing one, or a new one, laid out like its parameter if the shapes are equal."""
    if own is not None and own.shape == shape:
        return own
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


# --- objects with their own state


def stateful_values(stateful: Stateful) -> dict[str, Any]:
    """The states of all owners, by name. Raises UserError for a state with anything but plain values and tensors."""
    return {name: encoded(owner.get(), f"the state of {name}") for name, owner in stateful.owners.items()}


def load_stateful(stateful: Stateful, saved: dict[str, Any]) -> list[str]:
    """The inverse of `stateful_values`. Returns the names that only one side has; their owners are unchanged.

    An error of the owner's own method gets a note with its name.
    """
    for name in sorted(stateful.owners.keys() & saved.keys()):
        try:
            stateful.owners[name].set(decoded(saved[name]))
        except Exception as error:
            add_note(error, f"{name}: it does not take its state in the checkpoint")
            raise
    return sorted(stateful.owners.keys() ^ saved.keys())


# --- plain values


def encoded(value: Any, name: str) -> Any:
    """A copy that `torch.load(weights_only=True)` can read, with tensors on the host.

    name: the value's name, for the message. Raises UserError for values that a checkpoint cannot hold, when saving,
    since when loading it would be too late.
    """
    kind = type(value)
    if kind in _LEAVES or (kind is bytes and value):  # `torch.load` rejects empty ones
        return value
    if kind in (Tensor, torch.nn.Parameter):
        return value.detach().resolve_conj().resolve_neg().cpu().clone()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return {_ARRAY if kind is np.ndarray else _SCALAR: torch.from_numpy(np.array(value, order="C"))}
    if kind in _DICTS:
        keys = (encoded(key, f"a key of {name}") for key in value)
        items = (encoded(item, f"{name}[{key!r}]") for key, item in value.items())
        return kind(dict(zip(keys, items, strict=True)))
    if kind in _SEQUENCES:
        return kind(encoded(item, f"{name}[{number}]") for number, item in enumerate(value))
    raise UserError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it takes tensors, "
        "NumPy arrays, numbers, strings, None, and dicts, lists, tuples and sets of them; convert it, or set "
        "checkpointing=off"
    )


def decoded(saved: Any, device: torch.device | None = None) -> Any:
    """The inverse of `encoded`. device: device to move tensors to; None: tensors are not copied."""
    if isinstance(saved, Tensor):
        return saved if device is None else saved.to(device)
    if isinstance(saved, dict):
        if len(saved) == 1 and (array := saved.get(_ARRAY, saved.get(_SCALAR))) is not None:
            return array.numpy() if _ARRAY in saved else array.numpy()[()]
        return type(saved)({key: decoded(item, device) for key, item in saved.items()})
    return type(saved)(decoded(item, device) for item in saved) if type(saved) in _SEQUENCES else saved


def digest(value: Any) -> str:
    """A digest of an encoded value: equal for equal types and bits. Ignores the order of dicts and sets."""
    hasher = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype}{value.layout}{tuple(value.shape)}".encode())
        for part in strided_parts(value):
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            hasher.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        hasher.update("".join(sorted(digest(key) + digest(item) for key, item in value.items())).encode())
    elif type(value) in _SEQUENCES:
        parts = map(digest, value)
        hasher.update("".join(sorted(parts) if isinstance(value, set) else parts).encode())
    else:
        hasher.update(repr(value).encode())
    return hasher.hexdigest()
