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
    is_held: bool = False  # a transaction restores it differently: a module's tensors, a stream's samples

    def copy(self) -> Any:
        """The state, for `restore`. A generator's is already a copy; another, in a trace, would have no values."""
        return self.get() if self.kind == "generator" else _copied(self.get())

    def restore(self, state: Any) -> None:
        """Restore a state returned by `copy`, any number of times."""
        self.set(state if self.kind == "generator" else _copied(state))


def _copied(state: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), state)


class Stateful:
    """The owners of state in a model, a task and data sets, by name, such as `task.queue` or `data.transform.rng`.

    roots: by the first part of the names. `modules` are those found outside the model: in task and data, and in the
    model's attributes where it has not registered them.
    """

    def __init__(self, **roots: Any):
        self.roots = {name: root for name, root in roots.items() if root is not None}
        self.owners: dict[str, Owner] = {}
        self.modules: dict[str, nn.Module] = {}
        seen: set[int] = set()
        for root, held in self.roots.items():
            kind = next((kind for kind in ("task", "data") if root.endswith(kind)), root)
            for name, found, is_part in walk(held, root, seen):
                self._add(name, found, kind, is_part or found is self.roots.get("model"))

    def _add(self, name: str, found: Any, kind: str, is_part: bool) -> None:
        if isinstance(found, nn.Module):
            if has_extra_state(found):
                # The checkpoint has it with the module's tensors, where those are not the model's.
                self.owners[f"{name}.extra_state"] = Owner(found.get_extra_state, found.set_extra_state, kind)
            if not is_part:
                self.modules[name] = found
                self.owners[name] = Owner(found.state_dict, found.load_state_dict, kind, True)
        elif is_generator(found):
            get, put = (functools.partial(own, found) for own in (generator_state, set_generator_state))
            self.owners[name] = Owner(get, put, "generator")
        elif has_protocol(found):
            self.owners[name] = Owner(found.state_dict, found.load_state_dict, kind, moves_at_commit(found))


def walk(held: Any, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Any, bool]]:
    """`(name, found, is_part)` for every module, tensor and owner of state among an object, its attributes and what
    they hold. is_part: whether it is a registered submodule. seen: ids, to which those met are added; tensors are found
    in each place.
    """
    if isinstance(held, Tensor):
        yield name, held, False
    if isinstance(held, (Tensor, *_PLAIN)) or id(held) in seen or len(seen) > MOST_OBJECTS:
        return
    seen.add(id(held))
    if isinstance(held, nn.Module):
        parts = [(f"{name}.{path}" if path else name, module) for path, module in held.named_modules()]
        seen |= {id(module) for _, module in parts}
        for inner, module in parts:
            yield inner, module, module is not held
            for attribute, value in list(vars(module).items()):
                if attribute not in MODULE_ATTRIBUTES:
                    yield from walk(value, f"{inner}.{attribute}", seen, depth + 1)
        return
    if _owns_state(held):
        yield name, held, False
    for part, value in _children(held) if depth < DEPTH else ():
        inside = walk(value, f"{name}.{part}" if part else name, seen, depth + 1)
        yield from (one for one in inside if isinstance(one[1], Tensor)) if moves_at_commit(held) else inside


def held_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in attributes, lists and dicts, each once per place, and the parameters and buffers of modules."""
    seen: set[int] = set()
    for root in roots:
        for _, found, is_part in walk(root, "", seen):
            tensors: tuple[Tensor, ...] = (found,) if isinstance(found, Tensor) else ()
            if isinstance(found, nn.Module) and not is_part:
                tensors = (*found.parameters(), *found.buffers())
            yield from (tensor for tensor in tensors if not is_lazy(tensor))


def _children(held: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name: attributes, items, arguments that are bound to a function."""
    if isinstance(held, (list, tuple, deque, set, frozenset)):
        items = list(held)
        if not _is_table(items):
            yield from ((str(number), value) for number, value in enumerate(items))
    elif isinstance(held, dict):
        if not _is_table(list(held.values())):
            yield from ((str(key), value) for key, value in list(held.items()))
    elif isinstance(held, functools.partial):
        yield "", held.func
        yield from _children((*held.args, *held.keywords.values()))
    elif isinstance(held, types.MethodType):
        yield "", held.__self__
    elif isinstance(held, types.FunctionType):
        for variable, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=True):
            if cell != types.CellType():  # one that is not filled yet
                yield variable, cell.cell_contents
        yield from vars(held).items()
    elif not isinstance(held, (type, types.ModuleType)):
        home = type(held).__module__
        if home.partition(".")[0] not in FOREIGN or home.startswith(OPEN):
            yield from list(getattr(held, "__dict__", {}).items())


def _is_table(items: list[Any]) -> bool:
    ends = items[:1] + items[-1:]
    return len(items) > MOST_ITEMS and not any(isinstance(end, (Tensor, nn.Module)) or _owns_state(end) for end in ends)


def _owns_state(held: Any) -> bool:
    return is_generator(held) or has_protocol(held)


def has_protocol(held: Any) -> bool:
    """Whether the object's class has `state_dict` and `load_state_dict`."""
    kind = type(held)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def moves_at_commit(held: Any) -> bool:
    """Whether the object declares that its state, including everything it holds, changes only at a step's commit."""
    return getattr(type(held), "moves_at_commit", False) is True


def has_extra_state(module: nn.Module) -> bool:
    """Whether the module's class overrides `get_extra_state` and `set_extra_state`."""
    kind, base = type(module), nn.Module
    return kind.get_extra_state is not base.get_extra_state and kind.set_extra_state is not base.set_extra_state


def can_be_restored(tensor: Tensor) -> bool:
    """Whether the tensor can be restored: not if it is uninitialised (lazy modules) or does not allow in-place writes
    (an inference tensor, or an expanded one).
    """
    return not (is_lazy(tensor) or tensor.is_inference() or is_expanded(tensor))


def memory_of(tensor: Tensor) -> Tensor:
    """The tensor or, of a nested one, its values: torch copies no nested tensor into another's memory."""
    return tensor.values() if tensor.is_nested else tensor


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, so that the tensor cannot be filled."""
    has_strides = tensor.layout is torch.strided and not tensor.is_nested
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if has_strides else ()
    return any(stride == 0 and size > 1 for size, stride in pairs)
