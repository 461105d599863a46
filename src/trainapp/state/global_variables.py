"""Global variables that functions of the user's may assign, such as a counter of steps, restored with the step.

Only plain values: numbers, strings, None and tuples of these. What a global list or dict contains is not restored.
"""

import dis
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainapp.state.contents import attributes_of_class, members_and_globals
from trainapp.state.walk import is_foreign, namespaces_of, walk

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_STORE_ATTR = dis.opmap["STORE_ATTR"]

Record = list[dict[str, Any]]  # the values of each namespace's variables, by name


class _Namespace(NamedTuple):
    """A module's or a class's variables."""

    values: Mapping[str, Any]
    assign: Callable[[str, Any], None]
    names: set[str]  # of those that may be assigned


class GlobalVariables:
    """The global variables, and attributes of modules and classes, that functions reached from some objects may assign.
    Found once.

    Args:
        roots: models, tasks: objects or functions.

    Attributes: `namespaces`, in which the variables are.
    """

    def __init__(self, *roots: Any):
        self.namespaces: list[_Namespace] = []
        by_namespace: dict[int, _Namespace] = {}
        assigned_attributes: set[str] = set()
        classes: list[type] = []
        visited: set[int] = set()
        for root in roots:
            if is_foreign(root):
                continue
            for member in walk(root, "", visited, members_and_globals, math.inf):
                if isinstance(member.value, type):
                    classes.append(member.value)
                elif isinstance(member.value, types.FunctionType):
                    self._add_function(member.value, by_namespace, assigned_attributes)

        # Attributes of classes: by their names alone, since a function may reach a class in many ways.
        for users_class in classes:
            names = assigned_attributes & attributes_of_class(users_class).keys()
            if names:
                assign = _setter_of(users_class)
                self.namespaces.append(_Namespace(vars(users_class), assign, names))
        self.namespaces.extend(by_namespace.values())

    def _add_function(
        self, function: types.FunctionType, by_namespace: dict[int, _Namespace], assigned_attributes: set[str]
    ) -> None:
        """Add what one function may assign: global variables and attributes, among all the names in it."""
        opcodes = _opcodes(function.__code__)
        if _STORE_ATTR in opcodes:
            assigned_attributes |= set(function.__code__.co_names)
        for namespace in namespaces_of(function):
            is_own = namespace.variables is function.__globals__
            if (_STORE_GLOBAL if is_own else _STORE_ATTR) in opcodes:
                variables = namespace.variables
                empty = _Namespace(variables, variables.__setitem__, set())
                by_namespace.setdefault(id(variables), empty).names.update(namespace.names)

    def record(self) -> Record:
        """Return the plain values that the variables have now."""
        record = []
        for values, _, names in self.namespaces:
            plain = {}
            for name in names:
                value = values.get(name, self)  # no variable is this object
                if _is_plain(value):
                    plain[name] = value
            record.append(plain)
        return record

    def restore(self, record: Record) -> None:
        """Assign the recorded values to variables that have others."""
        for (values, assign, _), before in zip(self.namespaces, record, strict=True):
            for name, value in before.items():
                if values.get(name, self) is not value:
                    assign(name, value)


def _setter_of(users_class: type) -> Callable[[str, Any], None]:
    return lambda name, value: setattr(users_class, name, value)


def _opcodes(code: types.CodeType) -> set[int]:
    """Return the operations of a function and of those defined inside of it."""
    opcodes = set(code.co_code[::2])  # every second byte is an argument
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            opcodes |= _opcodes(constant)
    return opcodes


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))
