"""The attributes of an object as a dictionary, also those that a class with `__slots__` keeps outside of `__dict__`."""

import functools
import sys
import types
from collections.abc import Iterator, MutableMapping
from typing import Any

Attributes = MutableMapping[str, Any]


def has_attributes(value: Any) -> bool:
    """Return whether an object can have attributes."""
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots_of(value))


def attributes_of(value: Any) -> Attributes:
    """Return an object's attributes: a write to the dictionary is one to the object."""
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        attributes = {}
    slots = _slots_of(value)
    return _AttributesWithSlots(value, slots, attributes) if slots else attributes


def _slots_of(value: Any) -> dict[str, Any]:
    object_class: Any = type(value)
    return _slots_of_class(object_class)


@functools.cache
def _slots_of_class(object_class: type) -> dict[str, Any]:
    """Return the descriptors of a class's slots, by name; none of the standard library's classes."""
    slots: dict[str, Any] = {}
    for base in object_class.__mro__:
        if "__slots__" in vars(base) and base.__module__.partition(".")[0] not in sys.stdlib_module_names:
            for name, descriptor in vars(base).items():
                if isinstance(descriptor, types.MemberDescriptorType):
                    slots.setdefault(name, descriptor)
    return slots


class _AttributesWithSlots(Attributes):
    """The filled slots of an object, and then what is in its `__dict__`."""

    def __init__(self, value: Any, slots: dict[str, Any], attributes: dict[str, Any]):
        self._value = value
        self._slots = slots
        self._attributes = attributes

    def __iter__(self) -> Iterator[str]:
        for name, descriptor in self._slots.items():
            if self._is_filled(descriptor):
                yield name
        yield from self._attributes

    def __len__(self) -> int:
        return sum(map(self._is_filled, self._slots.values())) + len(self._attributes)

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._attributes[name]
        try:
            return self._slots[name].__get__(self._value)
        except AttributeError:  # the slot is empty
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._value, value)  # also of a frozen dataclass
        else:
            self._attributes[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._value)
        else:
            del self._attributes[name]

    def _is_filled(self, descriptor: Any) -> bool:
        try:
            descriptor.__get__(self._value)
        except AttributeError:
            return False
        return True

    def copy(self) -> dict[str, Any]:
        """Return a copy, as a dictionary's."""
        return dict(self)
