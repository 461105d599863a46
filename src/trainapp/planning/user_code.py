"""What the functions of users' code hold besides their arguments: closures, defaults, attributes, global variables.

Followed from the classes of a model's modules and of its task, by the names in their functions, through all that is
neither a library's nor trainapp's.
"""

import functools
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

MOST_FUNCTIONS = 5000
_KNOWN = frozenset({"torch", "trainapp", "builtins"})
_CODE = (types.ModuleType, types.FunctionType, types.MethodType, type, staticmethod, classmethod)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_known(value: Any) -> bool:
    """Whether a class, a function or the class of an object is torch's, trainapp's or Python's own."""
    home = getattr(value, "__module__", None) or type(value).__module__
    return str(home).partition(".")[0] in _KNOWN


class UserCode:
    """The functions and classes that `add` has reached."""

    def __init__(self) -> None:
        self._functions: dict[int, types.FunctionType] = {}
        self._classes: dict[int, type] = {}
        self._variables: dict[str, dict[str, Any]] = {}

    def add(self, value: Any) -> None:
        """Follow a class, a function, or what an object's class defines."""
        waiting = [value]
        while waiting and len(self._functions) < MOST_FUNCTIONS:
            found = _unwrapped(waiting.pop())
            if isinstance(found, types.FunctionType):
                if id(found) not in self._functions and _is_users(found.__module__):
                    self._functions[id(found)] = found
                    waiting += self._named_in(found)
                continue
            kind = found if isinstance(found, type) else type(found)
            if id(kind) in self._classes or not _is_users(kind.__module__):
                continue
            self._classes[id(kind)] = kind
            waiting += [part for each in kind.__mro__ if _is_users(each.__module__) for part in vars(each).values()]
            waiting += [base for base in kind.__mro__[1:] if id(base) not in self._classes]

    def held(self) -> dict[str, dict[str, Any]]:
        """What they hold, by the name of each."""
        found = {name: dict(values) for name, values in self._variables.items()}
        for kind in self._classes.values():
            found[kind.__qualname__] = {name: value for name, value in vars(kind).items() if _is_data(name, value)}
        for function in self._functions.values():
            if values := _held_by(function):
                found.setdefault(function.__qualname__.replace("<locals>.", ""), {}).update(values)
        return found

    def _named_in(self, function: types.FunctionType) -> Iterator[Any]:
        """Functions and classes that it names. Notes the variables that it names, in its module and in others."""
        names, variables = _names(function.__code__), function.__globals__
        yield from (cell for cell in _cells(function).values() if callable(cell))
        yield getattr(function, "__wrapped__", None)
        for name in names:
            value = variables.get(name)
            if isinstance(value, types.ModuleType) and _is_users(value.__name__):
                yield from self._found(value.__name__, {of: vars(value)[of] for of in names if of in vars(value)})
            elif name in variables:
                yield from self._found(function.__module__, {name: value})

    def _found(self, home: str, values: Mapping[str, Any]) -> Iterator[Any]:
        for name, value in values.items():
            if _is_data(name, value):
                self._variables.setdefault(home, {})[name] = value
            if not isinstance(value, types.ModuleType):
                yield value


@functools.cache
def _is_users(home: str | None) -> bool:
    """Whether a module is neither installed nor part of Python."""
    if home is None or home.partition(".")[0] in _KNOWN or home.partition(".")[0] in sys.stdlib_module_names:
        return home == "__main__"
    path = str(getattr(sys.modules.get(home), "__file__", None) or _INSTALLED[0])
    return not path.startswith(_INSTALLED) and "site-packages" not in path


def _unwrapped(value: Any) -> Any:
    """The function in a method, a property or a partial."""
    while True:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, (functools.partial, functools.cached_property)):
            value = value.func
        else:
            return value


def _names(code: types.CodeType) -> set[str]:
    """The global names and the attributes in it and in the functions that it defines."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _cells(function: types.FunctionType) -> dict[str, Any]:
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in pairs if cell != types.CellType()}


def _held_by(function: types.FunctionType) -> dict[str, Any]:
    defaults = {f"default {number}": value for number, value in enumerate(function.__defaults__ or ())}
    values = {**_cells(function), **defaults, **(function.__kwdefaults__ or {}), **vars(function)}
    return {name: value for name, value in values.items() if _is_data(name, value)}


def _is_data(name: str, value: Any) -> bool:
    """Whether it may count: an object that can be called may, a function does so in what it holds."""
    if name.startswith("__") or isinstance(value, (*_CODE, property, functools.cached_property)):
        return False
    return not callable(value) or _is_users(type(value).__module__)
