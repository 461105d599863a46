"""The search of users' objects: an object, what it holds, what that holds, and so on.

`walk` is the only one. What each of its users wants to enter is a function of theirs:

| user | enters | for |
|---|---|---|
| `stateful` | attributes, containers, bound arguments, closures | owners of state; tensors |
| `contents` | the same of users' objects alone; in trials global variables, too | what a trial or a retry restores |
| `attributes` | the attributes of modules and of the user's own objects | what a checkpoint leaves out |
"""

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from trainapp.rng import is_generator
from trainapp.state.slots import attributes_of
from trainapp.torch_private import MODULE_ATTRIBUTES

DEPTH = 5  # levels of attributes; a data set's transform may own a generator
MOST_ITEMS = 1000  # of a list or dict; longer ones are treated as tables, unless the first or last item matters
MOST_OBJECTS = 20_000
FOREIGN = ("torch", "numpy", "builtins", "pyarrow", "pandas")  # packages whose objects are not searched
OPEN = ("torch.utils.data",)  # exceptions that are searched: Subset and similar classes hold data sets
INSTALLED = frozenset(("site-packages", "dist-packages"))  # folders of installed packages
FOREIGN_PACKAGES = {*FOREIGN, *sys.stdlib_module_names, "trainapp", "transformers"}
# Whose modules keep their state in buffers, or whose attributes are caches.
LIBRARIES = ("torch.", "trainapp.", "transformers.")
# Torch's layers, of which a user's code may write a number all the same: BatchNorm's momentum, LeakyReLU's slope.
LAYERS = ("torch.nn.modules.",)
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)  # a script's settings, in which it counts its steps
_SEARCHED = (
    *(Tensor, np.ndarray, nn.Module, list, tuple, dict, set, deque),
    *(functools.partial, types.MethodType),
    *NAMESPACES,
)
_PLAIN = (str, bytes, int, float, complex, type(None), np.generic)


class Member(NamedTuple):
    """An object that `walk` has reached."""

    name: str
    value: Any
    depth: int = 0  # below the root; a submodule's is that of the module
    is_submodule: bool = False  # registered in a module that was reached before it
    is_within_owner: bool = False  # held by an object of which `moves_at_commit` is true

    def child(self, part: str, value: Any) -> "Member":
        """Return a member that this one holds. part: its name in this one; empty for the same name."""
        is_within_owner = self.is_within_owner or moves_at_commit(self.value)
        return Member(joined(self.name, part), value, self.depth + 1, is_within_owner=is_within_owner)


def walk(
    root: Any,
    name: str,
    visited: set[int],
    children: Callable[[Member], Iterator[Member]],
    most_levels: float = DEPTH,
) -> Iterator[Member]:
    """Yield an object and everything that it holds, each before what it holds itself, and once. Tensors and arrays are
    yielded in each place, plain values not at all.

    Args:
        root: the object.
        name: its name, with which the names of all others begin.
        visited: ids of objects that were reached before, to which these are added.
        children: returns what to enter next below a member. Submodules come by themselves.
        most_levels: below the root; modules are entered on the last one, too.
    """
    stack = [Member(name, root)]
    while stack:
        member = stack.pop()
        value = member.value

        # Leaves of the search.
        if isinstance(value, _PLAIN):
            continue
        if isinstance(value, (Tensor, np.ndarray)):
            yield member
            continue

        # Each object once. Submodules were marked with their module: an attribute may refer to one of them.
        if not member.is_submodule:
            if id(value) in visited or len(visited) > MOST_OBJECTS:
                continue
            visited.add(id(value))
        yield member

        # What it holds; of a module first what is in its attributes, then its submodules.
        next_members: list[Member] = []
        if isinstance(value, nn.Module) or member.depth < most_levels:
            next_members.extend(children(member))
        if isinstance(value, nn.Module) and not member.is_submodule:
            submodules = _submodules(member)
            visited.update(id(submodule.value) for submodule in submodules)
            next_members.extend(submodules)
        stack.extend(reversed(next_members))


def _submodules(member: Member) -> list[Member]:
    """Return all modules below one, without itself."""
    submodules = []
    for path, module in member.value.named_modules():
        if module is not member.value:
            submodules.append(member._replace(name=joined(member.name, path), value=module, is_submodule=True))
    return submodules


def held_members(member: Member) -> Iterator[Member]:
    """Yield what an object holds: attributes, of a module without nn.Module's own, items, arguments that are bound to a
    function, variables of its closure.
    """
    value = member.value
    if isinstance(value, nn.Module):
        for name, attribute in attributes_of_module(value).items():
            yield member.child(name, attribute)
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        items = list(value)
        if not _is_table(items):
            for index, item in enumerate(items):
                yield member.child(str(index), item)
    elif isinstance(value, dict):
        if not _is_table(list(value.values())):
            for key, item in list(value.items()):
                yield member.child(str(key), item)
    elif isinstance(value, functools.partial):
        yield member.child("", value.func)
        for index, argument in enumerate((*value.args, *value.keywords.values())):
            yield member.child(str(index), argument)
    elif isinstance(value, types.MethodType):
        yield member.child("", value.__self__)
    elif isinstance(value, types.FunctionType):
        for name, variable in (*closure_of(value).items(), *vars(value).items()):
            yield member.child(name, variable)
    elif not isinstance(value, (type, types.ModuleType)):
        module_name = type(value).__module__
        if module_name.partition(".")[0] not in FOREIGN or module_name.startswith(OPEN):
            for name, attribute in list(attributes_of(value).items()):
                yield member.child(name, attribute)


def attributes_of_module(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that are not nn.Module's own."""
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables of a function's closure."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # one that is not filled yet
            variables[name] = cell.cell_contents
    return variables


class Namespace(NamedTuple):
    """Variables of a module that a function uses."""

    module_name: str
    variables: dict[str, Any]  # all of the module's
    names: set[str]  # of those that the function uses


def namespaces_of(function: types.FunctionType) -> list[Namespace]:
    """Return what a function, or one defined inside of it, uses of its own module, and of the user's modules that it
    refers to, as in `utils.STEP += 1`.
    """
    names = _global_names(function.__code__)
    namespaces: list[Namespace] = []
    coming = [(function.__module__, function.__globals__)]
    visited = {id(function.__globals__)}
    while coming:
        module_name, variables = coming.pop()
        used = names & variables.keys()
        namespaces.append(Namespace(module_name, variables, used))
        for name in sorted(used):
            value = variables[name]
            if isinstance(value, types.ModuleType) and _is_users_module(value) and id(vars(value)) not in visited:
                visited.add(id(vars(value)))
                coming.append((value.__name__, vars(value)))
    return namespaces


def _global_names(code: types.CodeType) -> set[str]:
    """Return the names of global variables and attributes that a function, or one defined inside of it, uses."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _is_users_module(module: types.ModuleType) -> bool:
    """Return whether it is a module of the user's project, not of an installed package."""
    folders = Path(getattr(module, "__file__", None) or "").parts
    return INSTALLED.isdisjoint(folders) and module.__name__.partition(".")[0] not in FOREIGN_PACKAGES


def joined(*parts: str) -> str:
    """Return a name made of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def _is_table(items: list[Any]) -> bool:
    """Return whether these are rows of data, too many to be searched."""
    if len(items) <= MOST_ITEMS:
        return False
    ends = (items[0], items[-1])
    return not any(isinstance(item, (Tensor, nn.Module)) or owns_state(item) for item in ends)


# --- predicates


def owns_state(value: Any) -> bool:
    """Return whether the object has a state of its own: a generator, or one with `state_dict`."""
    return is_generator(value) or has_state_dict(value)


def has_state_dict(value: Any) -> bool:
    """Return whether the object has `state_dict` and `load_state_dict`, by its class or assigned to it."""
    return _has_method(value, "state_dict") and _has_method(value, "load_state_dict")


def _has_method(value: Any, name: str) -> bool:
    """Return whether the class or the object's own attributes have it: `getattr` would also ask `__getattr__`, which
    may have an answer for every name.
    """
    if callable(getattr(type(value), name, None)):
        return True
    return not isinstance(value, type) and callable(getattr(value, "__dict__", {}).get(name))


def is_foreign(value: Any) -> bool:
    """Return whether it is a library's, or a module of Python: users' tasks change neither."""
    if isinstance(value, types.ModuleType):
        return True
    if isinstance(value, (types.FunctionType, type)):
        return value.__module__.partition(".")[0] in FOREIGN_PACKAGES
    if isinstance(value, _SEARCHED):
        return False
    return type(value).__module__.partition(".")[0] in FOREIGN_PACKAGES


def is_iterator(value: Any) -> bool:
    """Return whether it is a generator or another iterator of a library's, such as of a data loader: what has been
    taken from it cannot be put back.
    """
    return isinstance(value, Iterator) and is_foreign(value)


def moves_at_commit(value: Any) -> bool:
    """Return whether the object declares that its state, including everything it holds, changes only at a step's
    commit.
    """
    return getattr(type(value), "moves_at_commit", False) is True
