"""Inspecting users' objects: owners of state, and the tensors and attributes that objects hold.

| owner | protocol of its state |
|---|---|
| a module | `get_extra_state` and `set_extra_state`, as in torch |
| the task, a data set, a metric, and objects they hold | `state_dict` and `load_state_dict` |
| a generator of torch, NumPy or Python | none: it is found in attributes, lists and dicts |

Used by `Snapshot` and by checkpoints.
"""

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainapp.rng import generator_state, is_generator, set_generator_state
from trainapp.torch_private import MODULE_ATTRIBUTES, tree_map

DEPTH = 5  # levels of attributes; a data set's transform may own a generator
MOST_ITEMS = 1000  # of a list or dict; longer ones are treated as tables, unless the first or last item matters
MOST_OBJECTS = 20_000
FOREIGN = ("torch", "numpy", "builtins", "pyarrow", "pandas")  # packages whose objects are not searched
OPEN = ("torch.utils.data",)  # exceptions that are searched: Subset and similar classes hold data sets
_PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)


class Owner(NamedTuple):
    """An object with its own state. `get` may return references; `set` may keep its argument."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    kind: str  # "model", "task", "data" or "callbacks"; "generator"
    is_restored_elsewhere: bool = False  # a transaction restores it differently: a module's tensors, a stream's samples

    def copy(self) -> Any:
        """Return the state, for `restore`."""
        if self.kind == "generator":
            return self.get()  # already a copy; another, in a trace, would have no values
        return _copied(self.get())

    def restore(self, state: Any) -> None:
        """Restore a state returned by `copy`, any number of times."""
        if self.kind != "generator":
            state = _copied(state)
        self.set(state)


def _copied(state: Any) -> Any:
    return tree_map(_copied_leaf, state)


def _copied_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf)


class Stateful:
    """The owners of state in a model, a task and data sets, by name, such as `task.queue` or `data.transform.rng`.

    Args:
        roots: objects to search, by the first part of the names.

    Attributes:
        owners: by name.
        modules: those outside the model: in task and data, and in the model's attributes where it has not registered
            them.
    """

    def __init__(self, **roots: Any):
        self.roots = {name: root for name, root in roots.items() if root is not None}
        self.owners: dict[str, Owner] = {}
        self.modules: dict[str, nn.Module] = {}
        self._names_when_built: dict[str, set[str]] = {}  # of the tensors of each module
        visited: set[int] = set()
        for root_name, root in self.roots.items():
            kind = _kind(root_name)
            for member in walk(root, root_name, visited):
                self._add(member, kind)

    def plain_tasks(self) -> dict[str, Any]:
        """Return the tasks with attributes that are no modules, by name."""
        tasks = {}
        for name, root in self.roots.items():
            if name.endswith("task") and hasattr(root, "__dict__") and not isinstance(root, nn.Module):
                tasks[name] = root
        return tasks

    def left_out(self) -> list[str]:
        """Return the names of tensors that forwards have registered in modules outside of the model, such as those of a
        teacher that a task makes in its first call: a new module would not take them.
        """
        names: list[str] = []
        for root, module in self.modules.items():
            names.extend(f"{root}.{name}" for name in sorted(self._new_names(root, module)))
        return names

    def _loadable_state(self, name: str) -> dict[str, Any]:
        """Return the state dict of a module without what is `left_out`."""
        module = self.modules[name]
        new_names = self._new_names(name, module)
        return {key: value for key, value in module.state_dict().items() if key not in new_names}

    def _new_names(self, name: str, module: nn.Module) -> set[str]:
        return _tensor_names(module) - self._names_when_built[name]

    def _add(self, member: "Member", kind: str) -> None:
        """Add the owners that a member is: of a module its extra state and, outside of the model, its state dict."""
        value = member.value
        if isinstance(value, nn.Module):
            if has_extra_state(value):
                # The checkpoint has it with the module's tensors, where those are not the model's.
                owner = Owner(value.get_extra_state, value.set_extra_state, kind)
                self.owners[f"{member.name}.extra_state"] = owner
            if not member.is_submodule and value is not self.roots.get("model"):
                self.modules[member.name] = value
                self._names_when_built[member.name] = _tensor_names(value)
                get_state = functools.partial(self._loadable_state, member.name)
                self.owners[member.name] = Owner(get_state, value.load_state_dict, kind, is_restored_elsewhere=True)
        elif is_generator(value):
            get = functools.partial(generator_state, value)
            set_state = functools.partial(set_generator_state, value)
            self.owners[member.name] = Owner(get, set_state, "generator")
        elif has_state_dict(value):
            is_restored_elsewhere = moves_at_commit(value)
            self.owners[member.name] = Owner(value.state_dict, value.load_state_dict, kind, is_restored_elsewhere)


def _tensor_names(module: nn.Module) -> set[str]:
    """Return the names of a module's parameters and buffers, in its submodules too."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, _ in (*parameters, *buffers)}


def _kind(root_name: str) -> str:
    """Return the kind of owners in a root: "data" for `eval_data`, "task" for `generator's task`."""
    for kind in ("task", "data"):
        if root_name.endswith(kind):
            return kind
    return root_name


class Member(NamedTuple):
    """A module, a tensor or an owner of state that `walk` has reached."""

    name: str
    value: Any
    is_submodule: bool = False  # registered in a module that was reached before it


def walk(value: Any, name: str, visited: set[int], depth: int = 0) -> Iterator[Member]:
    """Yield every module, tensor and owner of state among an object, its attributes and what they hold.

    Args:
        value: the object.
        name: its name, with which the names of its members begin.
        visited: ids of objects that were searched before, to which these are added. Tensors are yielded in each place.
        depth: its level below the root.
    """
    # Leaves of the search.
    if isinstance(value, Tensor):
        yield Member(name, value)
    if isinstance(value, (Tensor, *_PLAIN)) or id(value) in visited or len(visited) > MOST_OBJECTS:
        return
    visited.add(id(value))

    # The object itself.
    if isinstance(value, nn.Module):
        yield from _walk_module(value, name, visited, depth)
        return
    if _owns_state(value):
        yield Member(name, value)
    if depth >= DEPTH:
        return

    # What it holds.
    is_one_owner = moves_at_commit(value)  # of everything it holds except tensors
    for part, child in children(value):
        child_name = f"{name}.{part}" if part else name
        for member in walk(child, child_name, visited, depth + 1):
            if isinstance(member.value, Tensor) or not is_one_owner:
                yield member


def _walk_module(module: nn.Module, name: str, visited: set[int], depth: int) -> Iterator[Member]:
    """Yield a module, its submodules, and what is in their attributes but not registered."""
    # Mark all of them first: an attribute may refer to a registered submodule.
    submodules = list(module.named_modules())
    visited.update(id(submodule) for _, submodule in submodules)
    for path, submodule in submodules:
        submodule_name = f"{name}.{path}" if path else name
        yield Member(submodule_name, submodule, is_submodule=submodule is not module)
        for attribute, child in list(vars(submodule).items()):
            if attribute not in MODULE_ATTRIBUTES:
                yield from walk(child, f"{submodule_name}.{attribute}", visited, depth + 1)


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by name: attributes, items, arguments that are bound to a function."""
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        items = list(value)
        if not _is_table(items):
            for index, item in enumerate(items):
                yield str(index), item
    elif isinstance(value, dict):
        if not _is_table(list(value.values())):
            for key, item in list(value.items()):
                yield str(key), item
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from children((*value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        # The variables of its closure.
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # one that is not filled yet
                yield variable, cell.cell_contents
        yield from vars(value).items()
    elif not isinstance(value, (type, types.ModuleType)):
        module_name = type(value).__module__
        if module_name.partition(".")[0] not in FOREIGN or module_name.startswith(OPEN):
            yield from list(getattr(value, "__dict__", {}).items())


def _is_table(items: list[Any]) -> bool:
    """Return whether these are rows of data, too many to be searched."""
    if len(items) <= MOST_ITEMS:
        return False
    ends = (items[0], items[-1])
    return not any(isinstance(item, (Tensor, nn.Module)) or _owns_state(item) for item in ends)


def _owns_state(value: Any) -> bool:
    return is_generator(value) or has_state_dict(value)


def held_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in attributes, lists and dicts, each once per place, and the parameters and buffers of modules.
    Lazy ones are left out.
    """
    visited: set[int] = set()
    for root in roots:
        for member in walk(root, "", visited):
            tensors: list[Tensor] = []
            if isinstance(member.value, Tensor):
                tensors.append(member.value)
            elif isinstance(member.value, nn.Module) and not member.is_submodule:  # with those of its submodules
                tensors.extend(member.value.parameters())
                tensors.extend(member.value.buffers())
            for tensor in tensors:
                if not is_lazy(tensor):
                    yield tensor


# --- predicates


def has_state_dict(value: Any) -> bool:
    """Return whether the object's class has `state_dict` and `load_state_dict`."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def moves_at_commit(value: Any) -> bool:
    """Return whether the object declares that its state, including everything it holds, changes only at a step's
    commit.
    """
    return getattr(type(value), "moves_at_commit", False) is True


def has_extra_state(module: nn.Module) -> bool:
    """Return whether the module's class overrides `get_extra_state` and `set_extra_state`."""
    kind = type(module)
    overrides_get = kind.get_extra_state is not nn.Module.get_extra_state
    return overrides_get and kind.set_extra_state is not nn.Module.set_extra_state


def can_be_restored(tensor: Tensor) -> bool:
    """Return whether the tensor can be restored: not if it is uninitialised (lazy modules) or does not allow in-place
    writes (an inference tensor, or an expanded one).
    """
    return not (is_lazy(tensor) or tensor.is_inference() or is_expanded(tensor))


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, so that the tensor cannot be filled."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory_of(tensor: Tensor) -> Tensor:
    """Return the tensor or, of a nested one, its values: torch copies no nested tensor into another's memory."""
    return tensor.values() if tensor.is_nested else tensor
