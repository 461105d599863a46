"""Counts the live tensors of the CPU and enforces a limit on them.

The CPU's allocator knows no limit, and the system's own (RLIMIT_DATA) can crash oneDNN when it strikes. Counting live
storages in a dispatch mode is exact, acts alike every time and leaves autograd cleanly. It costs about 8 microseconds
for each operation, so it is worn only while a size is unproven and in steps that are logged.
"""

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from trainapp.parallel.dtensor import local
from trainapp.units import bytes_text

Resident = Mapping[str, Iterable[torch.Tensor]]  # what is in memory between two steps, by kind


class MemoryLimitExceeded(torch.OutOfMemoryError):
    """The tensors that are alive exceed `memory.limit`. Sizes are in bytes."""

    def __init__(self, operation: str, requested: int, used: int, limit: int):
        super().__init__(
            f"memory.limit: {operation} tried to allocate {bytes_text(requested)} with {bytes_text(used)} "
            f"of {bytes_text(limit)} in use"
        )
        self.operation, self.requested, self.used, self.limit = operation, requested, used, limit


class LiveTensors(TorchDispatchMode):
    """While active, counts the bytes of CPU storages that operations create, until they are freed.

    limit: bytes, or None to count only; devices: those that count, None for all.
    Attributes: `live` and `peak`, in bytes, with what `register` was given;
    `events`, `(storage number, bytes)` for each allocation and `(number, -bytes)` for each free; `kinds`, the kind of
    those storages that are known.
    """

    def __init__(self, limit: int | None = None, devices: tuple[str, ...] | None = ("cpu",)):
        super().__init__()
        self.limit, self.devices = limit, devices
        self.live = self.peak = 0
        self.events: list[tuple[int, int]] = []
        self.kinds: dict[int, str] = {}
        self._alive: dict[int, tuple[int, weakref.ref]] = {}
        self._number = 0

    def register(self, resident: Resident) -> None:
        """Count tensors that exist already. Raises MemoryLimitExceeded when they alone are too many."""
        for kind, tensors in resident.items():
            before, first = self.live, len(self.events)
            for tensor in tensors:
                self._count(tensor)
                self.label(kind, tensor)
            if self.live > before:  # one event for all of a kind: they were there from the start
                self.events[first:] = [(self._number, self.live - before)]
            if self.limit is not None and self.live > self.limit:
                raise MemoryLimitExceeded(f"the {kind}", self.live - before, before, self.limit)
        self.peak = max(self.peak, self.live)

    def label(self, kind: str, tensor: torch.Tensor) -> None:
        """Say what a live tensor is: gradients are known as such only once they have reached their parameter."""
        known = self._alive.get(local(tensor).untyped_storage()._cdata)
        if known is not None:
            self.kinds[known[0]] = kind

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps what follows once more, 3 microseconds for each operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        added = 0
        if isinstance(result, torch.Tensor):
            added = self._count(result)
        elif isinstance(result, (tuple, list)):
            added = sum(self._count(item) for item in result if isinstance(item, torch.Tensor))
        if added:
            if self.limit is not None and self.live > self.limit:
                raise MemoryLimitExceeded(str(func), added, self.live - added, self.limit)
            self.peak = max(self.peak, self.live)
        return result

    def _count(self, tensor: torch.Tensor) -> int:
        if self.devices is not None and tensor.device.type not in self.devices:
            return 0
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return 0
        size = storage.nbytes()
        number = self._number = self._number + 1

        def freed(_: weakref.ref, key: int = key, size: int = size, number: int = number) -> None:
            if self._alive.pop(key, None) is not None:
                self.live -= size
                self.events.append((number, -size))

        self._alive[key] = (number, weakref.ref(storage, freed))
        self.live += size
        self.events.append((number, size))
        return size


class _Tracker(ModuleTracker):
    """Takes no note of what activation checkpointing computes again: its hooks would keep all of that in memory."""

    def _fw_pre_hook(self, module, inputs) -> None:
        if not self.is_bw:
            super()._fw_pre_hook(module, inputs)

    def _fw_post_hook(self, module, inputs, output) -> None:
        if not self.is_bw:
            super()._fw_post_hook(module, inputs, output)


class ModulePath:
    """Knows in which module an error struck, in forward and in backward. `at_failure` is "" where there was none."""

    def __init__(self):
        self.at_failure = ""

    @contextlib.contextmanager
    def watch(self):
        """Around forward and backward. Costs some microseconds for each module."""
        with _Tracker() as tracker:
            try:
                yield
            except BaseException:
                deepest = max(tracker.parents, key=lambda name: name.count("."), default="")
                self.at_failure = deepest.partition(".")[2]  # the first part is the class of the whole model
                raise
