"""What modules and tasks hold in plain attributes, and which of it training has changed.

Values are compared by fingerprints, which hold no tensor: a checkpoint is saved long after the model was built.
"""

import hashlib
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.state.checksum import checksum
from trainapp.state.slots import attributes_of, has_attributes
from trainapp.state.stateful import Stateful, has_extra_state, memory_of
from trainapp.state.walk import (
    DEPTH,
    FOREIGN_PACKAGES,
    LAYERS,
    LIBRARIES,
    MOST_ITEMS,
    NAMESPACES,
    Member,
    attributes_of_module,
    has_state_dict,
    is_iterator,
    joined,
    walk,
)
from trainapp.torch_private import OPTIMIZER_ATTRIBUTES, outside_dispatch_modes, storage_id, strided_parts

LEVELS_OF_OBJECTS = 2  # a task may hold an object that holds another
CONTAINERS = (tuple, list, dict, set, frozenset, deque)
RESULT = "result of a forward"  # the fingerprint of what holds a tensor whose graph still exists
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


class Attributes:
    """The attributes of a model, of tasks, of modules elsewhere in them, and of optimizers. Create it once these are
    built: later differences are training's changes.

    Args:
        stateful: the model, tasks and modules.
        optimizers: by name.
    """

    def __init__(self, stateful: Stateful, optimizers: Mapping[str, torch.optim.Optimizer] | None = None):
        self._stateful = stateful
        self._optimizers = optimizers or {}
        self._built = self._fingerprints()

    def changed(self) -> list[str]:
        """Return the names of attributes that differ and that no state dict or extra state has; of results that a
        forward leaves for the loss, none.
        """
        absent = fingerprint(None)
        saved = self._saved_names()
        names = []
        for name, value in self._fingerprints().items():
            if name not in saved and value != RESULT and value != self._built.get(name, absent):
                names.append(name)
        return sorted(names)

    def _saved_names(self) -> set[str]:
        """Return the names in state dicts, among them what modules add to theirs."""
        names: set[str] = set()
        for root_name, root in self._roots().items():
            for name in root.state_dict(keep_vars=True):
                names.add(joined(root_name, name))
        return names

    def _fingerprints(self) -> dict[str, Any]:
        """Return the fingerprint of each attribute by its name. An object that only holds others has none, nor has a
        module that was there when the run was built: a checkpoint has it.
        """
        kinds = (Tensor, np.ndarray, nn.Module, *CONTAINERS, *_PLAIN)
        storages = self._storages_of_modules()
        built_modules: set[nn.Module] = set()
        for root in self._roots().values():
            built_modules.update(root.modules())
        fingerprints = {}
        for name, attributes in self._holders():
            for attribute, value in attributes.items():
                is_built = isinstance(value, nn.Module) and value in built_modules
                if (isinstance(value, kinds) or is_iterator(value)) and not is_built:
                    fingerprints[joined(name, attribute)] = fingerprint(value, storages)
        return fingerprints

    def _roots(self) -> dict[str, nn.Module]:
        """Return the outermost modules, by the first part of their attributes' names. Callbacks are not trained."""
        roots = {}
        if "model" in self._stateful.roots:
            roots[""] = self._stateful.roots["model"]
        for name, module in self._stateful.modules.items():
            if not name.startswith("callbacks."):
                roots[name] = module
        return roots

    def _holders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of modules and tasks without a state of their own, and of objects that they hold, by the
        holder's name.
        """
        roots: dict[str, Any] = dict(self._roots())
        for name, task in self._stateful.plain_tasks().items():
            if not has_state_dict(task):
                roots[name] = task

        visited: set[int] = set()
        for root_name, root in roots.items():
            for member in walk(root, root_name, visited, _objects_in_attributes, LEVELS_OF_OBJECTS):
                yield member.name, _attributes_to_compare(member.value)
        for name, optimizer in self._optimizers.items():
            yield name, _attributes_of_optimizer(optimizer)

    def _storages_of_modules(self) -> set[int]:
        tensors: list[Tensor] = []
        for root in self._roots().values():
            tensors.extend(root.parameters())
            tensors.extend(root.buffers())
        return storages_of(tensors)


def _objects_in_attributes(holder: Member) -> Iterator[Member]:
    """Yield the user's objects that these attributes hold, such as a replay buffer."""
    for name, value in _attributes_to_compare(holder.value).items():
        if _is_plain_object(value):
            yield holder.child(name, value)


def _attributes_to_compare(holder: Any) -> dict[str, Any]:
    """Return an object's attributes; of a module those that are not nn.Module's own, of torch's layers only numbers,
    and none of another library's module, or of one that saves an extra state.
    """
    if not isinstance(holder, nn.Module):
        return dict(attributes_of(holder))
    if has_extra_state(holder):
        return {}
    attributes = attributes_of_module(holder)
    if not type(holder).__module__.startswith(LIBRARIES):
        return attributes
    if type(holder).__module__.startswith(LAYERS):
        return {name: value for name, value in attributes.items() if isinstance(value, (int, float))}
    return {}


def _attributes_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a user's optimizer holds beside what its state dict has: attributes, and the state of an optimizer
    that it wraps.
    """
    if type(optimizer).__module__.startswith(LIBRARIES):
        return {}
    attributes = {}
    for name, value in vars(optimizer).items():
        if name in OPTIMIZER_ATTRIBUTES:
            continue
        if not isinstance(value, torch.optim.Optimizer):
            attributes[name] = value
        elif value.state is not optimizer.state:
            attributes[f"{name}.state"] = list(value.state.values())
    return attributes


def _is_plain_object(value: Any) -> bool:
    """Return whether it is an object of a user's class without a protocol for its state. Data sets may be too large to
    be compared.
    """
    if isinstance(value, (nn.Module, Tensor, type, *CONTAINERS)) or hasattr(value, "__getitem__"):
        return False
    is_of_user = type(value).__module__.partition(".")[0] not in FOREIGN_PACKAGES or isinstance(value, NAMESPACES)
    return is_of_user and has_attributes(value) and not has_state_dict(value)


def fingerprint(value: Any, registered: Collection[int] = (), depth: int = 0) -> Any:
    """Return what stands for a value: equal for equal plain values, arrays and tensors, also in containers, and for
    iterators at the same position; other objects are distinguished by their class only. `RESULT` if any tensor in it
    has a graph.

    Args:
        value: the value of an attribute.
        registered: the `storages_of` parameters and buffers: a second reference to one is no other state.
        depth: its level in containers.
    """
    # Tensors, arrays and plain values: by what they hold.
    kind = type(value).__qualname__
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            return RESULT
        return kind, *_values_of(value, registered)
    if isinstance(value, np.ndarray):
        return kind, value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, _PLAIN):
        return kind, repr(value)  # NaN equals NaN
    if isinstance(value, (set, frozenset)):
        return kind, len(value), {item for item in value if isinstance(item, _PLAIN)}

    if is_iterator(value):
        return kind, _position(value, registered, depth + 1)

    # Other objects, and those that restore themselves: by their class.
    if not isinstance(value, CONTAINERS) or has_state_dict(value):
        return kind

    # Containers: by the fingerprints of their items.
    items: list[Any] = list(value.items()) if isinstance(value, dict) else list(value)
    if depth >= DEPTH:
        return kind, len(items)
    if len(items) > MOST_ITEMS:  # rows of data; those at the ends of a queue change
        items = [len(items), items[0], items[-1]]
    parts = [fingerprint(item, registered, depth + 1) for item in items]
    if RESULT in parts:
        return RESULT
    return kind, parts


def has_iterators(value: Any) -> bool:
    """Return whether the value is an iterator, or a container that has one among its items."""
    if not isinstance(value, CONTAINERS):
        return is_iterator(value)
    return any(map(is_iterator, value.values() if isinstance(value, dict) else value))


def _position(iterator: Any, registered: Collection[int], depth: int) -> Any:
    """Return what stands for an iterator's position, without moving it; None where it cannot be seen."""
    if depth >= DEPTH:
        return None
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:  # finished
            return None
        inner = fingerprint(iterator.gi_yieldfrom, registered, depth)
        return frame.f_lasti, inner, fingerprint(frame.f_locals, registered, depth)
    if type(iterator).__module__ in ("builtins", "itertools"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, since Python 3.12
                parts = iterator.__reduce__()[1:]
        except TypeError:  # itertools, from Python 3.14 on: of `count`, its text has the position
            return repr(iterator)
        return fingerprint(parts, registered, depth)
    return getattr(iterator, "_num_yielded", None)  # of a data loader's iterator


@torch.no_grad()
def _values_of(tensor: Tensor, registered: Collection[int]) -> list[Any]:
    """Return shapes and checksums of a tensor's memory, without what is registered."""
    values = []
    with outside_dispatch_modes():
        for part in _parts(tensor):
            if storage_id(part.untyped_storage()) not in registered:
                values.append((str(part.dtype), tuple(part.shape), checksum(part).tolist()))
    return values


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the tensors' memory."""
    storages: set[int] = set()
    for tensor in tensors:
        for part in _parts(tensor):
            storages.add(storage_id(part.untyped_storage()))
    return storages


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold a tensor's values; none of fake, lazy, meta or sharded ones."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return []
    with torch.no_grad():
        return [part for part in strided_parts(memory_of(tensor)) if not part.is_meta]
