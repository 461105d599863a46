"""What objects, lists and dicts hold, recorded around a trial call and put back.

A `Snapshot` restores what the state of a run is made of. A trial of a task, before the first step, must leave no trace
in anything else, either: a replay buffer that is an object with a list, or a global variable.
"""

import functools
import math
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.state.attributes import fingerprint
from trainapp.state.checksum import checksum
from trainapp.state.slots import attributes_of, has_attributes
from trainapp.state.stateful import can_be_restored
from trainapp.state.walk import Member, Namespace, held_members, is_foreign, is_iterator, namespaces_of, walk

MOST_BYTES = 64 * 2**20  # of tensors and arrays that are copied
CONTAINERS = (list, deque, set, dict)  # that can be filled anew
_GLOBAL = "the global variable "  # how names of global variables begin


class Contents:
    """The contents of everything mutable that is reached from some objects: attributes, also of the user's classes,
    containers, the variables of closures, and global variables that functions of the user's read. Tensors of modules
    are left to a `Snapshot`.

    Args:
        roots: a model, a task: objects or functions, by the first part of the names of what they hold.

    Attributes:
        written_globals: names of global variables that a call is known to write, as of the last `restore`.
        advanced_iterators: names of iterators from which a call is known to take items: they stay where they are.
    """

    def __init__(self, **roots: Any):
        self.written_globals: set[str] = set()
        self.advanced_iterators: set[str] = set()
        self._bytes_left = MOST_BYTES
        self._records: list[_Record] = []

        # Objects that a root holds come first: they are no global variables, though a function may reach them as such.
        users_roots = {name: root for name, root in roots.items() if not is_foreign(root)}
        members: dict[int, Member] = {}
        for children in (users_members, members_and_globals):
            visited: set[int] = set()
            for name, root in users_roots.items():
                for member in walk(root, name, visited, children, math.inf):
                    members.setdefault(id(member.value), member)
        for member in members.values():
            self._record(member)

    def restore(self) -> None:
        """Put back what was recorded, any number of times. The containers stay the same objects."""
        for record in self._records:
            if record.is_unchanged():
                continue
            if isinstance(record, _Position):
                self.advanced_iterators.update(record.names())
            else:
                self.written_globals.update(name for name in record.names() if name.startswith(_GLOBAL))
                record.undo()

    def _record(self, member: Member) -> None:
        """Record what one object holds."""
        value = member.value
        if isinstance(value, CONTAINERS):
            self._records.append(Refill(member.name, value))
        elif isinstance(value, Tensor):
            self._record_values(member, value.nbytes if value.layout is torch.strided else 0)
        elif isinstance(value, np.ndarray):
            self._record_values(member, value.nbytes if value.flags.writeable else 0)
        elif isinstance(value, types.FunctionType):
            self._records.extend(map(_Rebind, namespaces_of(value)))
        elif isinstance(value, type):
            self._records.append(_ClassAttributes(value))
        elif is_iterator(value):
            self._records.append(_Position(member.name, value))
        elif is_users_object(value):
            self._records.append(Refill(member.name, attributes_of(value)))

    def _record_values(self, member: Member, size: int) -> None:
        """Copy a tensor or an array, if it can be filled and all copies together stay small."""
        value = member.value
        is_filled = True
        if isinstance(value, Tensor):
            has_bits = type(value) in (Tensor, nn.Parameter) and not value.is_meta and not value.is_nested
            is_filled = has_bits and can_be_restored(value) and value.grad_fn is None
        if 0 < size <= self._bytes_left and is_filled:
            self._bytes_left -= size
            self._records.append(_Overwrite(member.name, value))


class _Record(Protocol):
    """What one object held."""

    def names(self) -> Collection[str]:
        """Return what has changed, by name."""

    def is_unchanged(self) -> bool:
        """Return whether the object still holds it."""

    def undo(self) -> None:
        """Put it back."""


class Refill:
    """The items of a container, or the attributes of an object: a shallow copy, to put back into it.

    By the methods of Python's own types: those of a subclass, such as a cache that drops old items, may do more.
    """

    def __init__(self, name: str, container: Any):
        self.name = name
        self.container = container
        self.items: Any
        if isinstance(container, OrderedDict):
            self.items = dict(OrderedDict.items(container))
        elif isinstance(container, dict):
            self.items = dict.copy(container)
        elif isinstance(container, set):
            self.items = set(container)
        elif isinstance(container, (list, deque)):
            self.items = list(container)  # the cheapest copy of a deque, too: two thirds of another deque's time
        else:  # attributes in slots
            self.items = container.copy()

    def names(self) -> Collection[str]:
        return [self.name]

    def is_unchanged(self) -> bool:
        """Return whether the container holds the same objects, in the same order. They are not compared by value:
        tensors cannot be.
        """
        if len(self.container) != len(self.items):
            return False
        if isinstance(self.items, set):
            return bool(self.container == self.items)
        if isinstance(self.items, dict):
            own: Any = _own_methods(self.container)
            has_same_keys = all(map(operator.is_, own.keys(self.container), self.items))
            return has_same_keys and all(map(operator.is_, own.values(self.container), self.items.values()))
        return all(map(operator.is_, self.container, self.items))

    def undo(self) -> None:
        container = self.container
        if isinstance(container, list):
            list.clear(container)
            list.extend(container, self.items)
        elif isinstance(container, deque):
            deque.clear(container)
            deque.extend(container, self.items)
        elif isinstance(container, set):
            set.clear(container)
            set.update(container, self.items)
        elif not isinstance(container, dict):
            container.clear()
            container.update(self.items)
        else:
            own = _own_methods(container)
            own.clear(container)
            for key, value in self.items.items():
                own.__setitem__(container, key, value)


def _own_methods(container: Any) -> Any:
    """Return the type of Python's own whose methods read and write a dict, whatever its class makes of them."""
    for kind in (OrderedDict, dict):
        if isinstance(container, kind):
            return kind
    return type(container)  # attributes in slots


class _Rebind:
    """The global variables that a function reads in one module."""

    def __init__(self, namespace: Namespace):
        self.module_name = namespace.module_name
        self.variables = namespace.variables
        self.values = {name: self.variables[name] for name in namespace.names}

    def _changed(self) -> dict[str, Any]:
        """Return the former values of variables that have another one, by name."""
        return {name: value for name, value in self.values.items() if self.variables.get(name) is not value}

    def names(self) -> Collection[str]:
        return [_name_of_global(self.module_name, name) for name in self._changed()]

    def is_unchanged(self) -> bool:
        return not self._changed()

    def undo(self) -> None:
        self.variables.update(self._changed())


class _ClassAttributes:
    """The attributes of a class of the user's."""

    def __init__(self, users_class: type):
        self.users_class = users_class
        self.values = attributes_of_class(users_class)

    def names(self) -> Collection[str]:
        values_now = attributes_of_class(self.users_class)
        names = []
        for name in self.values | values_now:
            if name not in self.values or values_now.get(name) is not self.values[name]:
                names.append(_name_of_class_attribute(self.users_class, name))
        return names

    def is_unchanged(self) -> bool:
        return not self.names()

    def undo(self) -> None:
        values_now = attributes_of_class(self.users_class)
        for name in values_now.keys() - self.values.keys():
            delattr(self.users_class, name)
        for name, value in self.values.items():
            if values_now.get(name, self) is not value:  # no attribute is this record
                setattr(self.users_class, name, value)


class _Overwrite:
    """The values of a tensor or an array."""

    def __init__(self, name: str, value: Any):
        self.name = name
        self.value: Any = value
        self.copy: Any = value.detach().clone() if isinstance(value, Tensor) else value.copy()

    def names(self) -> Collection[str]:
        return [self.name]

    def is_unchanged(self) -> bool:
        """Return whether the bits are the same. A write through `.data` leaves a tensor's version as it was."""
        if isinstance(self.value, Tensor):
            return torch.equal(checksum(self.value), checksum(self.copy))
        return self.value.tobytes() == self.copy.tobytes()

    def undo(self) -> None:
        if isinstance(self.value, Tensor):
            with torch.no_grad():
                self.value.copy_(self.copy)
        else:
            self.value[...] = self.copy


class _Position:
    """The position of an iterator, which nothing puts back."""

    def __init__(self, name: str, iterator: Any):
        self.name = name
        self.iterator = iterator
        self.position = fingerprint(iterator)

    def names(self) -> Collection[str]:
        return [self.name]

    def is_unchanged(self) -> bool:
        return bool(fingerprint(self.iterator) == self.position)

    def undo(self) -> None:
        pass


def users_members(member: Member) -> Iterator[Member]:
    """Yield what an object of the user's holds, except what is a library's; but its iterators."""
    if is_iterator(member.value):  # what it holds moves with it
        return
    for held in held_members(member):
        if not is_foreign(held.value) or is_iterator(held.value):
            yield held


def members_and_globals(member: Member) -> Iterator[Member]:
    """Yield what an object of the user's holds, its classes with their functions and attributes, and global variables
    that functions read.
    """
    yield from users_members(member)
    value = member.value
    if isinstance(value, types.FunctionType):
        for module_name, variables, names in namespaces_of(value):
            for name in sorted(names):
                if not is_foreign(variables[name]) or is_iterator(variables[name]):
                    yield Member(_name_of_global(module_name, name), variables[name])
        return
    if isinstance(value, type):
        for attribute in vars(value).values():
            for function in _functions_of(attribute):
                yield member.child("", function)
        for name, attribute in attributes_of_class(value).items():
            if not is_foreign(attribute):
                yield Member(_name_of_class_attribute(value, name), attribute)
        return
    for users_class in type(value).__mro__:
        if not is_foreign(users_class):
            yield member.child("", users_class)


def _functions_of(attribute: Any) -> list[types.FunctionType]:
    """Return the functions in a class's attribute: a method, also static or of the class, or those of a property."""
    candidates: list[Any] = [attribute]
    if isinstance(attribute, (staticmethod, classmethod)):
        candidates = [attribute.__func__]
    elif isinstance(attribute, property):
        candidates = [attribute.fget, attribute.fset]
    elif isinstance(attribute, functools.cached_property):
        candidates = [attribute.func]
    return [candidate for candidate in candidates if isinstance(candidate, types.FunctionType)]


def attributes_of_class(users_class: type) -> dict[str, Any]:
    """Return the values that a class's own attributes have, without methods, properties and what Python itself sets."""
    attributes = {}
    for name, value in vars(users_class).items():
        is_special = name.startswith("__") and name.endswith("__")
        if not is_special and not hasattr(type(value), "__get__"):
            attributes[name] = value
    return attributes


def _name_of_class_attribute(users_class: type, name: str) -> str:
    return _name_of_global(users_class.__module__, f"{users_class.__qualname__}.{name}")


def _name_of_global(module_name: str, name: str) -> str:
    return f"{_GLOBAL}{module_name}.{name}"


def is_users_object(value: Any) -> bool:
    """Return whether the value is an object of the user's that has attributes, and neither a module nor a function."""
    if isinstance(value, (nn.Module, types.FunctionType, type, *CONTAINERS)) or is_foreign(value):
        return False
    return has_attributes(value)
