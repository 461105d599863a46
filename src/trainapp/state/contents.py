"""What objects, lists and dicts hold, recorded around a trial call and put back.

A `Snapshot` restores what the state of a run is made of. A trial of a task, before the first step, must leave no trace
in anything else, either: a replay buffer that is an object with a list, or a global variable.
"""

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.state.stateful import FOREIGN, MOST_OBJECTS, can_be_restored, children
from trainapp.torch_private import MODULE_ATTRIBUTES, version_of

MOST_BYTES = 64 * 2**20  # of tensors and arrays that are copied
FOREIGN_PACKAGES = {*FOREIGN, *sys.stdlib_module_names, "trainapp", "transformers"}
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)  # a script's settings, in which it counts its steps
_SEARCHED = (
    *(Tensor, np.ndarray, nn.Module, list, tuple, dict, set, deque, functools.partial, types.MethodType),
    *NAMESPACES,
)


class Contents:
    """The contents of everything mutable that is reached from some objects: attributes, also of the user's classes,
    containers, the variables of closures, and global variables that functions of the user's read. Tensors of modules
    are left to a `Snapshot`.

    Args:
        roots: a model, a task: objects or functions.
    """

    def __init__(self, *roots: Any):
        self._undo: list[Callable[[], None]] = []
        self._bytes_left = MOST_BYTES
        visited: set[int] = set()
        stack: list[Any] = list(roots)
        while stack and len(visited) < MOST_OBJECTS:
            value = stack.pop()
            if id(value) in visited or _is_foreign(value):
                continue
            visited.add(id(value))
            self._record(value)
            stack.extend(_held_by(value))

    def restore(self) -> None:
        """Put back what was recorded, any number of times. The containers stay the same objects."""
        for undo in self._undo:
            undo()

    def _record(self, value: Any) -> None:
        """Record what one object holds."""
        if isinstance(value, (list, deque)):
            self._undo.append(_Refill(value, list(value)))
        elif isinstance(value, set):
            self._undo.append(_Refill(value, set(value)))
        elif isinstance(value, dict):
            self._undo.append(_Refill(value, dict(value)))
        elif isinstance(value, Tensor):
            self._record_values(value, value.nbytes if value.layout is torch.strided else 0)
        elif isinstance(value, np.ndarray):
            self._record_values(value, value.nbytes if value.flags.writeable else 0)
        elif isinstance(value, types.FunctionType):
            names = _global_names(value.__code__)
            self._undo.append(_Rebind(value.__globals__, names))
        elif isinstance(value, type):
            self._undo.append(_SetAttributes(value))
        elif not isinstance(value, nn.Module) and isinstance(getattr(value, "__dict__", None), dict):
            self._undo.append(_Refill(vars(value), dict(vars(value))))

    def _record_values(self, value: Any, size: int) -> None:
        """Copy a tensor or an array, if it can be filled and all copies together stay small."""
        is_filled = True
        if isinstance(value, Tensor):
            is_filled = can_be_restored(value) and value.grad_fn is None and not value.is_nested
        if 0 < size <= self._bytes_left and is_filled:
            self._bytes_left -= size
            self._undo.append(_Overwrite(value))


class _Refill:
    """Puts items back into a container, which is touched only if it has changed."""

    def __init__(self, container: Any, held: Any):
        self.container = container
        self.held = held

    def __call__(self) -> None:
        if self._is_unchanged():
            return
        self.container.clear()
        if isinstance(self.container, (list, deque)):
            self.container.extend(self.held)
        else:
            self.container.update(self.held)

    def _is_unchanged(self) -> bool:
        """Return whether the container holds the same objects. They are not compared by value: tensors cannot be."""
        if len(self.container) != len(self.held):
            return False
        if isinstance(self.held, set):
            return self.container == self.held
        if isinstance(self.held, dict):
            missing = object()
            return all(self.container.get(key, missing) is value for key, value in self.held.items())
        return all(a is b for a, b in zip(self.container, self.held, strict=True))


class _Rebind:
    """Gives global variables of a module their former values."""

    def __init__(self, variables: dict[str, Any], names: set[str]):
        self.variables = variables
        self.values = {name: variables[name] for name in names if name in variables}

    def __call__(self) -> None:
        for name, value in self.values.items():
            if self.variables.get(name) is not value:
                self.variables[name] = value


class _SetAttributes:
    """Gives the attributes of a class their former values."""

    def __init__(self, kind: type):
        self.kind = kind
        self.values = _class_attributes(kind)

    def __call__(self) -> None:
        values_now = _class_attributes(self.kind)
        for name in values_now.keys() - self.values.keys():
            delattr(self.kind, name)
        for name, value in self.values.items():
            if name not in values_now or values_now[name] is not value:
                setattr(self.kind, name, value)


class _Overwrite:
    """Gives a tensor or an array its former values."""

    def __init__(self, value: Any):
        self.value = value
        self.version = version_of(value) if isinstance(value, Tensor) else None
        self.copy = value.detach().clone() if isinstance(value, Tensor) else value.copy()

    def __call__(self) -> None:
        if not isinstance(self.value, Tensor):
            self.value[...] = self.copy
        elif type(self.value) in (Tensor, nn.Parameter):
            self.value.data.copy_(self.copy)  # always: a write through `.data` leaves the version as it was
        elif version_of(self.value) != self.version:
            with torch.no_grad():
                self.value.copy_(self.copy)
            self.version = version_of(self.value)


def _held_by(value: Any) -> Iterator[Any]:
    """Yield what an object holds, and the functions and attributes of its class."""
    if isinstance(value, nn.Module):
        for name, attribute in list(vars(value).items()):
            if name not in MODULE_ATTRIBUTES:
                yield attribute
        yield from value.children()
    else:
        for _, child in children(value):
            yield child
    if isinstance(value, types.FunctionType):
        for name in _global_names(value.__code__):
            if name in value.__globals__:
                yield value.__globals__[name]
    elif isinstance(value, type):
        yield from (function for function in vars(value).values() if isinstance(function, types.FunctionType))
        yield from _class_attributes(value).values()
    else:
        yield from type(value).__mro__


def _class_attributes(kind: type) -> dict[str, Any]:
    """Return the values that a class's own attributes have, without methods, properties and what Python itself sets."""
    attributes = {}
    for name, value in vars(kind).items():
        is_special = name.startswith("__") and name.endswith("__")
        if not is_special and not hasattr(type(value), "__get__"):
            attributes[name] = value
    return attributes


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of global variables and attributes that a function, or one defined inside of it, reads."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _is_foreign(value: Any) -> bool:
    """Return whether it is a library's, or a module: users' tasks change neither."""
    if isinstance(value, types.ModuleType):
        return True
    if isinstance(value, (types.FunctionType, type)):
        return value.__module__.partition(".")[0] in FOREIGN_PACKAGES
    if isinstance(value, _SEARCHED):
        return False
    return type(value).__module__.partition(".")[0] in FOREIGN_PACKAGES
