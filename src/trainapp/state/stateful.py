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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainapp.rng import generator_state, is_generator, set_generator_state
from trainapp.state.slots import has_attributes
from trainapp.state.walk import Member, has_state_dict, held_members, moves_at_commit, owns_state, walk
from trainapp.torch_private import tree_map


class Owner(NamedTuple):
    """An object with its own state. `get` may return references; `set` may keep its argument."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    kind: str  # "model", "task", "data" or "callbacks"; "generator"
    is_restored_elsewhere: bool = False  # a rollback restores it differently: a module's tensors, a stream's samples

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
            for member in state_members(root, root_name, visited):
                self._add(member, kind)

    def plain_tasks(self) -> dict[str, Any]:
        """Return the tasks with attributes that are no modules, by name."""
        tasks = {}
        for name, task in self.tasks().items():
            if has_attributes(task) and not isinstance(task, nn.Module):
                tasks[name] = task
        return tasks

    def tasks(self) -> dict[str, Any]:
        """Return all tasks, by name."""
        return {name: root for name, root in self.roots.items() if name.endswith("task")}

    def modules_of_forwards(self) -> list[nn.Module]:
        """Return the modules outside of the model that are called with batches: all but those of data sets alone, which
        are called with samples.
        """
        roots = {name: root for name, root in self.roots.items() if _kind(name) != "data"}
        return list(Stateful(**roots).modules.values())

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

    def _add(self, member: Member, kind: str) -> None:
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


def state_members(root: Any, name: str, visited: set[int]) -> Iterator[Member]:
    """Yield every module, tensor and owner of state among an object, its attributes and what they hold: see `walk`.
    Of what moves at a step's commit as a whole, only tensors.
    """
    for member in walk(root, name, visited, held_members):
        is_owner = isinstance(member.value, nn.Module) or owns_state(member.value)
        if isinstance(member.value, Tensor) or (is_owner and not member.is_within_owner):
            yield member


def held_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in attributes, lists and dicts, each once per place, and the parameters and buffers of modules.
    Lazy ones are left out.
    """
    visited: set[int] = set()
    for root in roots:
        for member in state_members(root, "", visited):
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
