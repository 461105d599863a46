"""State outside of tensors that a trace cannot follow: what a model or its task counts or draws may decide what a later
step does. And what steps and evaluations leave for one another, which are traced apart.
"""

import hashlib
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.checkpoint.plain import digest, encoded
from trainapp.checkpoint.stateful import DEPTH, children, moves_at_commit
from trainapp.checksum import checksum
from trainapp.parallel.strategy import local
from trainapp.planning.user_code import UserCode, is_known
from trainapp.rng import generator_state, is_generator
from trainapp.torch_private import MODULE_ATTRIBUTES, buffers_of, outside_dispatch_modes, strided_parts

_OPEN = ("builtins", "collections", "functools", "itertools", "types", "dataclasses")  # of the standard library
_HOOKS = tuple(name for name in sorted(MODULE_ATTRIBUTES) if name.endswith("_hooks") and "state_dict" not in name)


Snapshot = dict[str, Any]  # comparable values by path
MOST_ITEMS = 1000  # of a container, from its end: a queue grows there


def moving_state(roots: Mapping[str, Any]) -> Snapshot:
    """What is in attributes of the model and the task, in those of their classes, in global variables beside these, and
    in the functions that they call, by path; of tensors, which have no values here, the shapes.

    roots: as in `Stateful`. A data set's is not looked at: in a trace it gives fewer batches than in a run.
    """
    own = _own(roots)
    called = _called(own)
    objects = {name: value for name, value in called.items() if not isinstance(value, types.FunctionType)}
    with outside_dispatch_modes():  # checksums of arrays are tensors
        return attributes_of(own | objects | _shared([*_parts(own.values()), *called.values()]), _leaf)


def buffer_shapes(roots: Mapping[str, Any]) -> Snapshot:
    """Of the buffers of model and task, by path, what memory depends on. One that gets other values in place, or is
    replaced by another one as large, stays the same.
    """
    modules = {name: held for name, held in _own(roots).items() if isinstance(held, nn.Module)}
    with outside_dispatch_modes():
        return {
            ".".join(filter(None, (root, path, name))): None if buffer is None else _extent(buffer)
            for root, held in modules.items()
            for path, module in held.named_modules()
            for name, buffer in buffers_of(module).items()
        }


def moved(before: Snapshot, after: Snapshot) -> list[str]:
    """The names of those that differ, with what is new or gone."""
    return sorted(name.removeprefix("model.") for name in differences(before, after))


def _own(roots: Mapping[str, Any]) -> dict[str, Any]:
    return {name: held for name, held in roots.items() if not name.endswith("data")}


def _extent(buffer: Tensor) -> tuple[Any, ...]:
    parts = strided_parts(local(buffer))
    return (tuple(buffer.shape), buffer.dtype, *(part.untyped_storage().nbytes() for part in parts))


def _parts(roots: Iterable[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(root.modules() if isinstance(root, nn.Module) else [root] for root in roots)


def _called(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Functions in attributes, and hooks, by path: `attributes_of` leaves out what can be called."""
    found = {}
    for root, held in roots.items():
        for path, module in held.named_modules() if isinstance(held, nn.Module) else ():
            functions = {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
            for hooks in _HOOKS:
                numbered = enumerate(getattr(module, hooks).values())
                functions |= {f"{hooks.strip('_')}.{number}": hook for number, hook in numbered}
            for name, value in functions.items():
                if callable(value) and not is_known(value):
                    found[".".join(filter(None, (root, path, name)))] = _without_owner(value)
    return found


def _without_owner(function: Any) -> Any:
    """Of a method of a module, which is looked at by itself, the function alone."""
    is_bound = isinstance(function, types.MethodType) and isinstance(function.__self__, nn.Module)
    return function.__func__ if is_bound else function


def _shared(parts: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Attributes of users' classes, global variables of the files that define them, and what users' functions hold that
    these may call: by the name of each.
    """
    code = UserCode()
    for part in parts:
        code.add(part)
    found = code.held()
    for kind in {type(part) for part in parts}:
        if not is_known(kind):
            found.setdefault(kind.__qualname__, {}).update(_variables(vars(kind)))
            module = vars(sys.modules.get(kind.__module__, kind))
            found.setdefault(kind.__module__, {}).update(_variables(module))
    return found


def _variables(held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in held.items()
        if not name.startswith("__") and not callable(value) and not isinstance(value, (types.ModuleType, property))
    }


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, torch.Generator):
        return None  # what it draws is a tensor: to decide anything, that is read
    if is_generator(value):
        return digest(encoded(generator_state(value), ""))
    package = type(value).__module__.partition(".")[0]
    if package == "trainapp" or (package in sys.stdlib_module_names and package not in _OPEN):
        return None  # what checkpointed blocks know; loggers, locks, files
    if isinstance(value, Iterator):
        return object()  # unlike any other: nothing tells how far it is
    return plain_leaf(value)


class Contents(NamedTuple):
    """A tensor or an array, with all that a difference may be in."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    sums: str

    def __str__(self) -> str:
        checksum = hashlib.sha256(self.sums.encode()).hexdigest()[:8]
        return f"{self.kind} {list(self.shape)} of {self.dtype.removeprefix('torch.')} (checksum {checksum})"


def attributes_of(roots: Mapping[str, Any], leaf_of: Callable[[Any], Any]) -> Snapshot:
    """What is in the attributes of these objects, by path. leaf_of: something comparable for a value, NO_LEAF for one
    whose own attributes or items are to be looked at.
    """
    found: Snapshot = {}
    seen: set[int] = set()
    for root, held in roots.items():
        _add(found, root, held, leaf_of, seen, 0)
    return found


def _add(found: Snapshot, name: str, held: Any, leaf_of: Callable[[Any], Any], seen: set[int], depth: int) -> None:
    leaf = leaf_of(held)
    if leaf is not NO_LEAF:
        found[name] = leaf
        return
    if id(held) in seen or depth > DEPTH or moves_at_commit(held):
        return
    seen.add(id(held))
    parts: Iterable[tuple[Any, Any]]
    if isinstance(held, torch.nn.Module):
        parts = (
            (".".join(filter(None, (path, attribute))), value)
            for path, module in held.named_modules()
            for attribute, value in vars(module).items()
            if attribute not in MODULE_ATTRIBUTES and not callable(value)
        )
    elif isinstance(held, (list, tuple, deque, dict)):
        found[f"len({name})"] = len(held)
        parts = list(held.items() if isinstance(held, dict) else enumerate(held))[-MOST_ITEMS:]
    elif isinstance(held, (set, frozenset)):
        parts = enumerate(sorted(map(repr, held))[:MOST_ITEMS])
    else:
        parts = children(held)
    for part, value in parts:
        _add(found, f"{name}.{part}" if part != "" else name, value, leaf_of, seen, depth + 1)


NO_LEAF = object()


def plain_leaf(value: Any) -> Any:
    """Something comparable for a plain value or an array; NO_LEAF for others."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        sums = checksum(torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8)))
        return Contents("an array", value.shape, str(value.dtype), str(sums.tolist()))
    return NO_LEAF


def differences(a: Snapshot, b: Snapshot) -> dict[str, tuple[Any, Any]]:
    """What differs, by path, with both values. NaN equals NaN."""
    pairs = {name: (a.get(name, "absent"), b.get(name, "absent")) for name in a | b}
    return {name: (x, y) for name, (x, y) in pairs.items() if type(x) is not type(y) or (x != y and repr(x) != repr(y))}
