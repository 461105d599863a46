"""State outside of tensors: who owns some in a model, a task and data sets, and how it is remembered.

| what | protocol |
|---|---|
| a module | `get_extra_state` and `set_extra_state`, as in torch |
| the task, what it holds, a data set | `state_dict` and `load_state_dict` |
| a generator of torch, NumPy or Python | none: it is found in attributes, lists and dicts |

Both the transaction of a step and the checkpoint honour them.
"""

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainapp.checkpoint.plain import decoded, encoded
from trainapp.errors import add_note
from trainapp.rng import is_generator
from trainapp.snapshot import Owner, Snapshot, attributes_owner, generator_owner, has_extra_state
from trainapp.torch_private import MODULE_ATTRIBUTES

DEPTH = 5  # attributes of attributes; a data set's transform may own a generator
MOST_ITEMS = 1000  # of a list or dict; longer ones are data, unless the first item owns state
MOST_OBJECTS = 10_000
FOREIGN = ("torch", "numpy", "builtins", "pyarrow", "pandas")  # their objects are not looked into
OPEN = ("torch.utils.data",)  # but these are: Subset and the like hold data sets


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
        if is_generator(found):
            self.owners[name] = generator_owner(found)
        elif isinstance(found, nn.Module):
            if has_extra_state(found):
                # The checkpoint has it with the module's tensors, where those are not the model's.
                self.owners[f"{name}.extra_state"] = Owner(found.get_extra_state, found.set_extra_state, kind)
            if not is_part:
                self.modules[name] = found
                self.owners[name] = Owner(found.state_dict, found.load_state_dict, kind, True)
        elif has_protocol(found):
            self.owners[name] = Owner(found.state_dict, found.load_state_dict, kind, moves_at_commit(found))

    def owners_in(self, *roots: str) -> dict[str, Owner]:
        """The owners whose names begin with one of these."""
        return {name: owner for name, owner in self.owners.items() if name.partition(".")[0] in roots}

    def snapshot(self, updates: int = 1) -> Snapshot:
        """Of everything that a step may change in these objects. updates: of a step, see `Snapshot`.

        Callbacks run between steps, where there is nothing to restore.
        """
        owners = {n: owner for n, owner in self.owners.items() if not owner.is_held and owner.kind != "callbacks"}
        for name, task in self.roots.items():  # an object with a counter, say, and no state_dict
            if name.endswith("task") and hasattr(task, "__dict__") and not isinstance(task, nn.Module):
                owners[f"{name}.attributes"] = attributes_owner(task)
        model = {"model": self.roots["model"]} if "model" in self.roots else {}
        return Snapshot(model | self.modules, owners, updates)

    def state_dict(self) -> dict[str, Any]:
        """All states as plain values and tensors, for a checkpoint. Raises UserError for one that holds others."""
        return {name: encoded(owner.get(), f"the state of {name}") for name, owner in self.owners.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """The inverse of `state_dict`. Returns the names that only one side has: their owners stay as they are.

        An error of the owner's own method has a note of its name.
        """
        for name in sorted(self.owners.keys() & saved.keys()):
            try:
                self.owners[name].set(decoded(saved[name]))
            except Exception as error:
                add_note(error, f"{name}: it does not take its state in the checkpoint")
                raise
        return sorted(self.owners.keys() ^ saved.keys())


def walk(held: Any, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Any, bool]]:
    """`(name, object, is_part)` for every module and every owner of state among an object, its attributes and what they
    hold. is_part: whether it is a registered submodule. seen: ids, to which those met are added.
    """
    if id(held) in seen or len(seen) > MOST_OBJECTS or isinstance(held, (str, bytes, int, float, Tensor, np.ndarray)):
        return
    seen.add(id(held))
    if isinstance(held, nn.Module):
        yield name, held, False
        parts = list(held.named_modules())
        seen |= {id(module) for _, module in parts}
        for path, module in parts:
            inner = f"{name}.{path}" if path else name
            if path:
                yield inner, module, True
            for attribute, value in vars(module).items():
                if attribute not in MODULE_ATTRIBUTES:
                    yield from walk(value, f"{inner}.{attribute}", seen, depth + 1)
        return
    if is_generator(held) or has_protocol(held):
        yield name, held, False
    if moves_at_commit(held):
        return
    if depth < DEPTH:
        for part, value in children(held):
            yield from walk(value, f"{name}.{part}" if part else name, seen, depth + 1)


def children(held: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name: attributes, items, arguments that are bound to a function."""
    if isinstance(held, (list, tuple, deque, set, frozenset)):
        if len(held) <= MOST_ITEMS or _owns_state(next(iter(held))):
            yield from ((str(number), value) for number, value in enumerate(held))
    elif isinstance(held, dict):
        if len(held) <= MOST_ITEMS or _owns_state(next(iter(held.values()))):
            yield from ((str(key), value) for key, value in held.items())
    elif isinstance(held, functools.partial):
        yield "", held.func
        yield from children((*held.args, *held.keywords.values()))
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
            yield from getattr(held, "__dict__", {}).items()


def _owns_state(held: Any) -> bool:
    return is_generator(held) or has_protocol(held)


def has_protocol(held: Any) -> bool:
    """Whether the object's class has `state_dict` and `load_state_dict`."""
    kind = type(held)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def moves_at_commit(held: Any) -> bool:
    """Whether the object says that its state, which covers all that it holds, moves only when a step is committed."""
    return getattr(type(held), "moves_at_commit", False) is True
