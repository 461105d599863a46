"""Counts live CPU tensors and enforces a limit on them.

The CPU's allocator has no limit of its own, and the system's (RLIMIT_DATA) can crash oneDNN when it is reached.
Counting live storages in a dispatch mode is exact and repeatable, and an error raised from it leaves autograd intact.
It costs about 8 microseconds per operation, so it is enabled only while a size is unproven and in logged steps.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainapp.memory.categories import Category
from trainapp.memory.kept import KeptStorages, WeakStorages
from trainapp.parallel.strategy import local
from trainapp.torch_private import ASKS_DEVICE, DispatchMode, ForwardModuleTracker, storage_id
from trainapp.units import bytes_text

Resident = Mapping[Category, Iterable[Tensor]]  # the tensors that exist before a piece of work
Events = list[tuple[int, int]]  # (storage number, bytes) per allocation, (storage number, -bytes) per free
Kinds = dict[int, Category]  # by storage number; a number without a kind is an activation


class MemoryLimitExceeded(torch.OutOfMemoryError):
    """The live tensors exceed `memory.limit`. Sizes are in bytes."""

    def __init__(self, operation: str, requested: int, used: int, limit: int):
        super().__init__(
            f"memory.limit: {operation} tried to allocate {bytes_text(requested)} with {bytes_text(used)} "
            f"of {bytes_text(limit)} in use"
        )
        self.operation, self.requested, self.used, self.limit = operation, requested, used, limit


class LiveTensors(DispatchMode):
    """While active, counts the bytes of the storages that operations create, until they are freed.

    limit: bytes, or None to count only; devices: the types whose storages count, None for all; ignored: what existed
    before and never counts, unless `register` names it as something else than a batch.
    Attributes: `live` and `peak`, in bytes, including what `register` was given; `events` and `kinds`, the record of
    every allocation and free.
    """

    def __init__(
        self,
        limit: int | None = None,
        devices: tuple[str, ...] | None = ("cpu",),
        ignored: WeakStorages | None = None,
    ):
        super().__init__()
        self.limit, self.devices = limit, devices
        self._ignored = WeakStorages() if ignored is None else ignored
        self.live = self.peak = 0
        self.events: Events = []
        self.kinds: Kinds = {}
        self._alive: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}  # number, bytes, storage
        self._gathered: list[list[int]] = []  # keys of storages that FSDP fills and empties together
        self._number = 0

    def register(self, resident: Resident) -> None:
        """Count tensors that exist already. Raises MemoryLimitExceeded when they alone exceed the limit."""
        for kind, tensors in resident.items():
            self._register(kind, self._storages_of(tensors), may_be_ignored=kind is Category.BATCH)

    def register_kept(self, kept: KeptStorages) -> int:
        """Count what has been kept from earlier work, after `register`. Returns its bytes. Raises MemoryLimitExceeded
        as that does.
        """
        storages = [*kept.carried, *self._storages_of(kept.owned())]
        new = [storage for storage in storages if storage_id(storage) not in self._alive]
        before = self.live
        self._register(Category.KEPT, new, may_be_ignored=True)
        return self.live - before

    def _register(self, kind: Category, storages: Iterable[torch.UntypedStorage], may_be_ignored: bool) -> None:
        before, first = self.live, len(self.events)
        for storage in storages:
            self._count_storage(storage, may_be_ignored)
            self._label(kind, storage)
        if self.live > before:  # one event per kind: they all existed from the start
            self.events[first:] = [(self._number, self.live - before)]
        if self.limit is not None and self.live > self.limit:
            raise MemoryLimitExceeded(f"the {kind.label}", self.live - before, before, self.limit)
        self.peak = max(self.peak, self.live)

    def surviving(self) -> Iterator[torch.UntypedStorage]:
        """What is counted and still exists, but for what FSDP has gathered, which it empties unseen."""
        gathered = {key for group in self._gathered for key in group}
        for key, (_, _, ref) in list(self._alive.items()):
            storage = ref()
            if storage is not None and key not in gathered:
                yield storage

    def label(self, kind: Category, tensor: Tensor) -> None:
        """Set the kind of a live tensor; no effect if it is not counted."""
        if tensor.layout is torch.strided:
            self._label(kind, local(tensor).untyped_storage())

    def _label(self, kind: Category, storage: torch.UntypedStorage) -> None:
        counted = self._alive.get(storage_id(storage))
        if counted is not None:
            self.kinds[counted[0]] = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        if self._gathered:
            self._note_emptied()
        result = func(*args, **(kwargs or {}))
        added = 0
        if isinstance(result, Tensor):
            added = self._count(result)
        elif isinstance(result, (tuple, list)):
            added = sum(self._count(item) for item in result if isinstance(item, Tensor))
        elif result is None and kwargs and "out" in kwargs:
            added = self._count_filled(kwargs["out"])
        if added:
            if self.limit is not None and self.live > self.limit:
                raise MemoryLimitExceeded(str(func), added, self.live - added, self.limit)
            self.peak = max(self.peak, self.live)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._note_emptied()

    def _count_filled(self, tensors: list[Tensor]) -> int:
        """Bytes that FSDP2 has gathered into storages that it empties and fills by resizing them, which no operation
        shows (torch 2.13, fsdp/_fully_shard/_fsdp_param.py); copying the values does.
        """
        storages = [tensor.untyped_storage() for tensor in tensors]
        keys = [storage_id(storage) for storage in storages]
        for key, storage in zip(keys, storages, strict=True):
            if key in self._alive and self._alive[key][1] != storage.nbytes():
                self._forget(key)
        added = sum(self._count(tensor) for tensor in tensors)
        self._gathered = [group for group in self._gathered if group != keys]
        self._gathered.append(keys)
        return added

    def _note_emptied(self) -> None:
        """One storage per group is enough: FSDP2 empties all that it has gathered at once."""
        for group in list(self._gathered):
            storage = self._alive[group[0]][2]() if group[0] in self._alive else None
            if storage is None or not storage.nbytes():
                self._gathered.remove(group)
                for key in group:
                    self._forget(key)

    def _forget(self, key: int) -> None:
        if (found := self._alive.pop(key, None)) is not None:
            self.live -= found[1]
            self.events.append((found[0], -found[1]))

    def _storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The storage that counts for the tensor, if one does."""
        if self.devices is not None and tensor.device.type not in self.devices:
            return None
        if tensor.layout is not torch.strided:  # of a sparse one, the indices and values count
            return None
        return local(tensor).untyped_storage()

    def _storages_of(self, tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
        """One at a time, since the caller's tensors may not be kept alive either: see `Buckets.existing`."""
        for tensor in tensors:
            storage = self._storage_of(tensor)
            if storage is not None:
                yield storage

    def _count(self, tensor: Tensor) -> int:
        """Bytes that this tensor adds: 0 if its storage is already counted."""
        storage = self._storage_of(tensor)
        return 0 if storage is None else self._count_storage(storage)

    def _count_storage(self, storage: torch.UntypedStorage, may_be_ignored: bool = True) -> int:
        key = storage_id(storage)
        if key in self._alive or (may_be_ignored and key in self._ignored):
            return 0
        size = storage.nbytes()
        number = self._number = self._number + 1

        def freed(_: weakref.ref[torch.UntypedStorage], key: int = key, size: int = size, number: int = number) -> None:
            if self._alive.pop(key, None) is not None:
                self.live -= size
                self.events.append((number, -size))

        self._alive[key] = (number, size, weakref.ref(storage, freed))
        self.live += size
        self.events.append((number, size))
        return size


class ModulePath:
    """The module in which an error was raised, in forward or backward: `at_failure`, "" where there was none."""

    def __init__(self) -> None:
        self.at_failure = ""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Use around forward and backward. Costs a few microseconds per module."""
        with ForwardModuleTracker() as tracker:
            try:
                yield
            except BaseException:
                deepest = max(tracker.parents, key=lambda name: name.count("."), default="")
                self.at_failure = deepest.partition(".")[2]  # the first part is the class of the whole model
                raise
