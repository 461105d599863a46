"""How to take the content of mutable values of each type, and to put it back. See `contents`."""

import array
import collections
import contextlib
import functools
import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainapp.rng import generator_state, is_generator_class, set_generator_state
from trainapp.same_values import slots_of
from trainapp.techniques.callable_kinds import CALLABLES
from trainapp.techniques.kind import FOREIGN, PLAIN, Kind, are_identical, home_of, items, put_nothing
from trainapp.techniques.library_kinds import BIT_GENERATOR, LIBRARY, OPEN
from trainapp.torch_private import version_of


def written_to(tensor: Tensor) -> int:
    """How often. An inference tensor does not count: 0."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _replace(kind: Any, add: str) -> Callable[[Any, Any], None]:
    """In-place replacement, by the methods of the built-in class: a subclass may count, or refuse."""

    def put(value: Any, content: Any) -> None:
        kind.clear(value)
        getattr(kind, add)(value, content)

    return put


def _mapping(kind: Any) -> Kind:
    def put(value: Any, content: Any) -> None:
        kind.clear(value)
        for key, item in zip(content[::2], content[1::2], strict=True):
            kind.__setitem__(value, key, item)

    def take(value: Any) -> list[Any]:
        return [part for pair in kind.items(value) for part in pair]

    return Kind(take, put, lambda content: items(content[1::2]), are_identical, is_container=True)


def _set_all(value: Any, content: Any) -> None:
    value[:] = content


def _array_is_same(a: Any, b: Any) -> bool:
    return a is b or (not a.dtype.hasobject and np.array_equal(a, b))


_CONTAINERS: dict[type, Kind] = {
    list: Kind(lambda v: list(list.__iter__(v)), _replace(list, "extend"), items, are_identical, is_container=True),
    tuple: Kind(lambda v: tuple.__getitem__(v, slice(None)), put_nothing, items, are_identical, is_container=True),
    collections.deque: Kind(list, _replace(collections.deque, "extend"), items, are_identical, is_container=True),
    set: Kind(lambda v: list(set.__iter__(v)), _replace(set, "update"), items, are_identical, is_container=True),
    collections.OrderedDict: _mapping(collections.OrderedDict),
    dict: _mapping(dict),
    bytearray: Kind(bytes, _set_all, is_container=True),
    array.array: Kind(lambda v: v[:], _set_all, is_container=True),
}


def _object(kind: type, has_attributes: bool = True) -> Kind:
    """For objects of a class: their attributes, and what is in its slots."""
    slots = [(f".{slot.__name__}", slot) for slot in slots_of(kind)]

    def take(value: Any) -> dict[str, Any]:
        attributes = getattr(value, "__dict__", {}) if has_attributes else {}
        content = {f".{name}": held for name, held in attributes.items()}
        for name, slot in slots:
            with contextlib.suppress(AttributeError):  # it is not filled
                content[name] = slot.__get__(value)
        return content

    def put(value: Any, content: dict[str, Any]) -> None:
        by_slot = dict(slots)
        attributes = {name[1:]: held for name, held in content.items() if name not in by_slot}
        if has_attributes and hasattr(value, "__dict__"):
            value.__dict__.clear()
            value.__dict__.update(attributes)
        for name, slot in slots:
            if name in content:
                slot.__set__(value, content[name])
            else:
                with contextlib.suppress(AttributeError):
                    slot.__delete__(value)

    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a.keys() == b.keys() and all(a[name] is b[name] for name in a)

    return Kind(take, put, lambda content: content.items(), same)


def _both(first: Kind, second: Kind) -> Kind:
    """For a subclass of a container, which has attributes, too."""

    def put(value: Any, content: Any) -> None:
        for kind, part in zip((first, second), content, strict=True):
            if kind.put is not None:
                kind.put(value, part)

    return Kind(
        lambda value: (first.take(value), second.take(value)),
        put,
        lambda content: itertools.chain(first.parts(content[0]), second.parts(content[1])),
        lambda a, b: first.same(a[0], b[0]) and second.same(a[1], b[1]),
        first.is_container,
    )


def _position(iterator: Any) -> Any:
    """Of an iterator: something that differs after each step, but holds nothing that the steps change."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, *map(repr, map(id, frame.f_locals.values())))
    if isinstance(iterator, (list, dict, set)):
        return len(iterator)
    if isinstance(iterator, tuple):
        return tuple(map(_position, iterator))
    if not isinstance(iterator, Iterator):
        return iterator if type(iterator) in PLAIN else id(iterator)
    with warnings.catch_warnings(), contextlib.suppress(TypeError):
        warnings.simplefilter("ignore", DeprecationWarning)  # copies of itertools, from Python 3.12 on
        return _position(iterator.__reduce__())
    return repr(iterator)


ARRAY = Kind(lambda v: v.copy() if v.flags.writeable else v, np.copyto, same=_array_is_same)


def addresses_of(array: Any) -> range:
    """From the first to the last byte of its memory. Strides may be negative."""
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    start = array.__array_interface__["data"][0]
    low, high = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    return range(start + low, start + high + array.itemsize) if array.size else range(0)


@functools.lru_cache(maxsize=1000)
def kind_of(kind: type) -> Kind | None:
    """None for values that do not change, or that nothing is known about."""
    if kind in PLAIN or issubclass(kind, type):
        return None
    if issubclass(kind, nn.Module):
        return _object(kind, has_attributes=False) if slots_of(kind) else None
    if issubclass(kind, Tensor):
        return Kind(written_to)
    if is_generator_class(kind):
        return Kind(generator_state, set_generator_state, same=lambda a, b: False, always=True)
    if issubclass(kind, np.random.BitGenerator):
        return BIT_GENERATOR
    if issubclass(kind, np.ndarray):
        return ARRAY if kind is np.ndarray else None
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    own = _object(kind) if kind.__dictoffset__ or slots_of(kind) else None
    if base is not None:
        return _both(_CONTAINERS[base], own) if own is not None else _CONTAINERS[base]
    if kind in LIBRARY:
        return LIBRARY[kind]
    if kind in CALLABLES:
        return CALLABLES[kind]
    home = home_of(kind)
    if issubclass(kind, Iterator) and home in ("builtins", "itertools"):
        return Kind(_position)
    return own if home not in FOREIGN or kind in OPEN else None
