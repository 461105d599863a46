"""A block of work that leaves no trace in the model, the task and the data: `untouched`.

The restore point of a step covers what a forward is expected to change. This covers what a forward may change when
unasked: plain attributes too, and the first write to a parameter, without a copy of the model.
"""

import contextlib
import functools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.checkpoint.plain import digest, encoded
from trainapp.checkpoint.stateful import DEPTH, FOREIGN, MOST_OBJECTS, Stateful, children
from trainapp.errors import UserError
from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.rng import preserved_rng
from trainapp.torch_operators import draws_numbers, written_arguments
from trainapp.torch_private import DispatchMode

MOST_KEPT = 100_000  # items of a container that is copied
_DICTS = (dict, OrderedDict, defaultdict, Counter)  # not classes of the user's, which may refuse to be filled
# Of the standard library, only these are looked into: putting back what a lock or a queue holds would break it.
_OPEN = ("builtins", "collections", "functools", "types")
_NUMBERS = (int, float)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), Tensor, torch.dtype, torch.device, range)


class KeepsWritten(DispatchMode):
    """While active, copies memory that is older than itself before an operation writes to it; `restore` puts it back.

    Writes through NumPy are not seen. Attribute: `has_drawn`, whether an operation took random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False
        self._new: set[int] = {0}  # addresses of memory that was allocated inside; 0: of tensors without elements
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [tensor for value in (*args, *kwargs.values()) for tensor in _plain_tensors(value)]
        self.has_drawn = self.has_drawn or draws_numbers(func)
        for tensor in self._written(func, args, kwargs):
            self._keep(tensor)
        result = func(*args, **kwargs)
        before = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._new |= {tensor.untyped_storage().data_ptr() for tensor in _plain_tensors(result)} - before
        return result

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
        if "batch_norm" in str(func):  # its statistics, which the schema does not name
            values = (*args, *kwargs.values())
        else:
            writes = written_arguments(func) if hasattr(func, "_schema") else ()
            values = tuple(arg for arg, is_written in zip(args, writes, strict=False) if is_written)
            values = (*values, *kwargs.values()) if any(writes[len(args) :]) else values
        for value in values:
            yield from _plain_tensors(value)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self._new and place not in self._copies:
            self._copies[place] = storage, storage.clone()

    def restore(self) -> None:
        """Put back what was written. Call outside of the mode."""
        for storage, copy in self._copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors with memory of their own, also in lists."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain_tensors(item)


class Attributes:
    """What attributes, containers, closures and global variables hold, reachable from some objects; see `children`.

    numbers_only: only attributes that are numbers before and after, such as a counter. What is loaded or opened lazily
    stays so: its file may be closed.
    """

    def __init__(self, *roots: Any, numbers_only: bool = False):
        self._numbers_only = numbers_only
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        for root in roots:
            self._visit(root, 0)

    def restore(self) -> None:
        """Let them hold the same objects as before."""
        for undo in self._undo:
            undo()

    def _visit(self, held: Any, depth: int) -> None:
        if isinstance(held, _LEAVES) or id(held) in self._seen or depth > DEPTH or len(self._seen) > MOST_OBJECTS:
            return
        self._seen.add(id(held))
        package = type(held).__module__.partition(".")[0]
        if package in sys.stdlib_module_names and package not in _OPEN:
            return
        if isinstance(held, nn.Module):
            for module in held.modules():
                self._seen.add(id(module))
                self._keep_module(module, depth)
            return
        if type(held) in _DICTS:
            self._keep_dict(held)
        elif type(held) in (list, deque, set):
            self._keep_items(held)
        elif isinstance(held, types.FunctionType):
            self._keep_function(held, depth)
        elif isinstance(held, types.MethodType):
            self._visit(held.__func__, depth)
        elif isinstance(held, (type, types.ModuleType)) or type(held).__module__.partition(".")[0] in FOREIGN:
            pass
        elif hasattr(held, "__dict__"):
            self._keep_dict(vars(held))
        for _, value in children(held):
            self._visit(value, depth + 1)

    def _keep_module(self, module: nn.Module, depth: int) -> None:
        self._keep_dict(vars(module))
        for name, value in vars(module).items():
            if name not in MODULE_ATTRIBUTES:
                self._visit(value, depth + 1)
            elif isinstance(value, dict):  # of parameters, buffers, modules or hooks
                self._keep_dict(value)

    def _keep_function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            if cell != types.CellType():  # one that is not filled yet
                self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        variables = {name: function.__globals__[name] for name in names}
        own = {n: v for n, v in variables.items() if not isinstance(v, (type, types.ModuleType)) and not callable(v)}
        self._undo.append(lambda: function.__globals__.update(own))
        for value in own.values():
            self._visit(value, depth + 1)

    def _keep_dict(self, held: dict) -> None:
        if len(held) > MOST_KEPT:
            return
        before = dict(held)

        def undo_numbers() -> None:
            for key in [key for key, value in held.items() if type(value) in _NUMBERS]:
                if key not in before:  # the class may have its first value
                    del held[key]
                elif type(before[key]) in _NUMBERS:
                    held[key] = before[key]

        def undo() -> None:
            if len(held) != len(before) or any(held.get(key, before) is not value for key, value in before.items()):
                held.clear()
                held.update(before)

        self._undo.append(undo_numbers if self._numbers_only else undo)

    def _keep_items(self, held: Any) -> None:
        if len(held) > MOST_KEPT or self._numbers_only:
            return
        before = list(held)

        def undo() -> None:
            if len(held) != len(before) or any(a is not b for a, b in zip(held, before, strict=True)):
                held.clear()
                (held.update if isinstance(held, set) else held.extend)(before)

        self._undo.append(undo)


@contextlib.contextmanager
def untouched(device: torch.device, **roots: Any) -> Iterator[KeepsWritten]:
    """What the block does to `roots` is undone after it: see `Stateful` for their names; and to the global generators.

    Costs a walk over what the roots hold, and copies of what is written.
    """
    stateful = Stateful(**roots)
    others = [root for name, root in roots.items() if name != "data"]
    states, attributes, written = stateful.take(), Attributes(*others), KeepsWritten()
    of_data = Attributes(roots.get("data"), numbers_only=True)
    frozen = [(p, p.requires_grad) for m in (roots["model"], *stateful.modules.values()) for p in m.parameters()]
    with preserved_rng(device), stateful.preserved_generators():
        try:
            with written:
                yield written
        finally:
            written.restore()
            attributes.restore()
            of_data.restore()
            for parameter, needs_gradient in frozen:
                parameter.requires_grad_(needs_gradient)
            now = stateful.take()
            # Only where attributes were not all of it: a method of the user's is not called without need.
            changed = {name: state for name, state in states.items() if not _are_equal(state, now[name])}
            stateful.restore(changed, but=("generator",))


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return digest(encoded(a, "")) == digest(encoded(b, ""))
    except UserError:  # it holds more than plain values and tensors
        return False
