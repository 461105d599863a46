"""What is held by an object and by what it holds: attributes, containers and arrays, to be restored.

Tensors' contents are not copied here: see `KeepsWritten`, which copies only what is written.
"""

import contextlib
import functools
import logging
import sys
import types
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.checkpoint.stateful import DEPTH, FOREIGN, MOST_OBJECTS, children, slots_of
from trainapp.models.inspect import MODULE_ATTRIBUTES
from trainapp.units import bytes_text

MOST_KEPT = 100_000  # items of a container that is copied
MOST_COPIED = 64 * 2**20  # bytes of an array that is copied; a larger one is compared by a checksum
_DICTS = (dict, OrderedDict, defaultdict, Counter)  # not classes of the user's, which may refuse to be filled
# Of the standard library, only these are looked into: putting back what a lock or a queue holds would break it.
_OPEN = ("builtins", "collections", "functools", "types")
_NUMBERS = (int, float)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), Tensor, torch.dtype, torch.device, range)
_EMPTY = object()  # instead of the value of a slot that has none
log = logging.getLogger(__name__)


class Attributes:
    """What attributes, slots, containers, closures and global variables hold, reachable from some objects (see
    `children`), and the contents of the NumPy arrays among them.

    numbers_only: only attributes that are numbers before and after, such as a counter. What is loaded or opened lazily
    stays so: its file may be closed. Attribute: `tensors`, those met outside of modules' registries, whose contents are
    the caller's to restore.
    """

    def __init__(self, *roots: Any, numbers_only: bool = False):
        self._numbers_only = numbers_only
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self.tensors: list[Tensor] = []
        for root in roots:
            self._visit(root, 0)

    def restore(self) -> None:
        """Let them hold the same objects as before."""
        for undo in self._undo:
            undo()

    def _visit(self, held: Any, depth: int) -> None:
        if isinstance(held, Tensor) and has_plain_memory(held):
            self.tensors.append(held)
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
        elif type(held) in (list, deque, set, bytearray):
            self._keep_items(held)
        elif isinstance(held, np.ndarray):
            self._keep_array(held)
        elif isinstance(held, types.FunctionType):
            self._keep_function(held, depth)
        elif isinstance(held, types.MethodType):
            self._visit(held.__func__, depth)
        elif isinstance(held, (type, types.ModuleType)) or type(held).__module__.partition(".")[0] in FOREIGN:
            pass
        else:
            if hasattr(held, "__dict__"):
                self._keep_dict(vars(held))
            self._keep_slots(held)
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

    def _keep_slots(self, held: Any) -> None:
        slots = slots_of(type(held))
        before = {slot: slot.__get__(held) for slot in slots if _is_filled(slot, held)}

        def undo() -> None:  # through the descriptors: the class may forbid assignment, as frozen dataclasses do
            for slot in slots:
                value = slot.__get__(held) if _is_filled(slot, held) else _EMPTY
                own = before.get(slot, _EMPTY)
                if self._numbers_only and not all(type(one) in (*_NUMBERS, type(_EMPTY)) for one in (value, own)):
                    continue
                if own is _EMPTY and value is not _EMPTY:
                    slot.__delete__(held)
                elif own is not value:
                    slot.__set__(held, own)

        self._undo.append(undo)

    def _keep_array(self, held: np.ndarray) -> None:
        if self._numbers_only or not held.flags.writeable:
            return
        if held.nbytes > MOST_COPIED:
            before = _checksum(held)
            self._undo.append(lambda: None if _checksum(held) == before else _note_written(held))
            return
        copy = held.copy()

        def undo() -> None:
            held[...] = copy

        self._undo.append(undo)


@contextlib.contextmanager
def restored(*roots: Any) -> Iterator[None]:
    """What the block does to the `Attributes` of these objects is undone after it."""
    attributes = Attributes(*roots)
    try:
        yield
    finally:
        attributes.restore()


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own that can be copied: not that of a subclass, which may be sharded."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided and not tensor.is_meta


def _is_filled(slot: Any, held: Any) -> bool:
    try:
        slot.__get__(held)
    except AttributeError:
        return False
    return True


def _checksum(array: np.ndarray) -> int:
    """Of the contents, read some at a time; of an array of objects, of which objects they are."""
    rows = np.atleast_1d(array)
    if rows.dtype.hasobject:
        return hash(tuple(map(id, rows.flat)))
    total, step = 0, max(1, MOST_COPIED * len(rows) // rows.nbytes)
    for start in range(0, len(rows), step):
        total = zlib.crc32(np.ascontiguousarray(rows[start : start + step]).view(np.uint8).data, total)
    return total


def _note_written(array: np.ndarray) -> None:
    log.warning(
        "a trial call of the task before training has written to a NumPy array of %s: from %s on there is no copy, so "
        "that training begins with what was written; keep it in a tensor, or write to it only while the model trains",
        bytes_text(array.nbytes),
        bytes_text(MOST_COPIED),
    )
