"""Counts live CPU tensors by category, and enforces a limit on them.

The CPU's allocator has no limit, and reaching the system's (RLIMIT_DATA) can crash oneDNN.
Counting live storages in a dispatch mode is exact and repeatable, and an error raised from it leaves autograd intact.
It costs about 8 microseconds per operation, so it is enabled only while a size is unvalidated and in logged steps.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.torch_private import ASKS_DEVICE, LIFT, DispatchMode, is_fake, local, may_view, storage_id
from trainapp.units import bytes_text

SMALLEST_RETAINED = 64  # bytes; ignores scalars, of which a run retains a few at other times than a trace


class Category(str, Enum):
    """The content of a piece of memory, in the stacking order of a timeline.

    The value is the name in metrics, as in `memory/optimizer_state`, and in a report's JSON; `label` is for display.
    """

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    BUFFERS = "buffers"
    WEIGHT_AVERAGE = "weight_average"
    BATCH = "batch"
    GRADIENTS = "gradients"
    COMMUNICATION_BUFFERS = "communication_buffers"  # DDP's buckets; its gradients are views of them
    KEPT = "kept"  # other tensors retained from earlier steps: a memory bank in a list, a teacher
    ACTIVATIONS = "activations"  # all other tensors
    # CUDA: the context and the libraries' own allocations, some hundred MiB, and other processes, which the driver's
    # counter does not separate.
    OUTSIDE_ALLOCATOR = "outside_allocator"

    def __str__(self) -> str:  # Enum's own differs between Python 3.10 and 3.12 inside an f-string
        return self.value

    @property
    def label(self) -> str:
        """The name with spaces: `optimizer state`."""
        return self.value.replace("_", " ")


Resident = Mapping[Category, Iterable[Tensor]]  # the tensors that exist before a piece of work
Events = list[tuple[int, int]]  # (storage number, bytes) per allocation, (storage number, -bytes) per free
StorageCategories = dict[int, Category]  # by storage number; a number without a category is an activation


class MemoryLimitExceeded(torch.OutOfMemoryError):
    """The live tensors exceed `memory.limit`. Sizes are in bytes.

    Args:
        operation: what asked for memory.
        requested: by it.
        used: before it.
        limit: the limit.
        category: of tensors that existed before the work and exceed the limit by themselves; None for what an operation
            has made.
    """

    def __init__(self, operation: str, requested: int, used: int, limit: int, category: Category | None = None):
        super().__init__(
            f"memory.limit: {operation} tried to allocate {bytes_text(requested)} with {bytes_text(used)} "
            f"of {bytes_text(limit)} in use"
        )
        self.operation = operation
        self.requested = requested
        self.used = used
        self.limit = limit
        self.category = category


class _CountedStorage(NamedTuple):
    number: int  # as in the events
    size: int  # bytes
    reference: "weakref.ref[torch.UntypedStorage]"  # counting must not keep anything alive


class LiveTensors(DispatchMode):
    """A counter of the bytes of the storages that operations create while it is active, until they are freed.

    Args:
        limit: in bytes, or None to only count.
        devices: device types to count, None for all.
        before: the counter of the previous work, whose surviving tensors `register_retained` counts.
    """

    def __init__(
        self,
        limit: int | None = None,
        devices: tuple[str, ...] | None = ("cpu",),
        before: "LiveTensors | None" = None,
    ):
        super().__init__()
        self.limit = limit
        self.devices = devices
        self.live = 0  # bytes, including registered tensors
        self.peak = 0  # the highest value of `live`
        self.events: Events = []  # every allocation and free
        self.categories: StorageCategories = {}
        self._alive: dict[int, _CountedStorage] = {}  # by storage_id
        self._gathered: list[list[int]] = []  # groups of storage_ids that FSDP fills and empties together
        self._last_number = 0
        self._retained = [] if before is None else before._surviving()

    # --- what exists before the work

    def register(self, resident: Resident) -> None:
        """Count tensors that already exist. Raises MemoryLimitExceeded if these exceed the limit.

        A batch that is a view of a larger tensor does not count: the latter belongs to a data set.
        """
        for category, tensors in resident.items():
            self._register(category, self._storages_of(tensors, whole=category is Category.BATCH))

    def register_retained(self) -> None:
        """Count tensors retained from earlier work, after `register`. Raises like `register`."""
        existing = []
        for reference in self._retained:
            storage = reference()
            if storage is not None:
                existing.append(storage)
        self._register(Category.KEPT, (storage for storage in existing if storage_id(storage) not in self._alive))
        self._retained = []

    def _register(self, category: Category, storages: Iterable[torch.UntypedStorage]) -> None:
        live_before = self.live
        first_event = len(self.events)
        for storage in storages:
            self._count_storage(storage)
            self._label(category, storage)

        # One event for all, since they existed from the start.
        added = self.live - live_before
        if added > 0:
            self.events[first_event:] = [(self._last_number, added)]
        if self.limit is not None and self.live > self.limit:
            raise MemoryLimitExceeded(f"the {category.label}", added, live_before, self.limit, category)
        self.peak = max(self.peak, self.live)

    def _surviving(self) -> list["weakref.ref[torch.UntypedStorage]"]:
        """Return counted or retained storages that still exist.

        Not those gathered by FSDP, which empties them unseen.
        """
        gathered = set()
        for keys in self._gathered:
            gathered.update(keys)
        surviving = list(self._retained)
        for key, counted in list(self._alive.items()):  # a copy: a storage may be freed meanwhile
            if key not in gathered and counted.size >= SMALLEST_RETAINED:
                surviving.append(counted.reference)
        return surviving

    # --- categories

    def label(self, category: Category, tensor: Tensor) -> None:
        """Set the category of a live tensor; no effect if it is not counted."""
        if tensor.layout is torch.strided:
            self._label(category, local(tensor).untyped_storage())

    def _label(self, category: Category, storage: torch.UntypedStorage) -> None:
        counted = self._alive.get(storage_id(storage))
        if counted is not None:
            self.categories[counted.number] = category

    # --- what operations create

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        if self._gathered:
            self._record_emptied()
        result = func(*args, **(kwargs or {}))
        if may_view(func) and args and func is not LIFT and self._is_view(result, args[0]):  # its base may not count
            return result

        # Count what the operation has created: a tensor, several, or values in gathered parameters.
        added = 0
        if isinstance(result, Tensor):
            added = self._count(result)
        elif isinstance(result, (tuple, list)):
            added = sum(self._count(part) for part in result if isinstance(part, Tensor))
        elif result is None and kwargs and "out" in kwargs:
            added = self._count_gathered(kwargs["out"])

        # What it has freed is already subtracted, by the callbacks of the weak references.
        if added:
            if self.limit is not None and self.live > self.limit:
                raise MemoryLimitExceeded(str(func), added, self.live - added, self.limit)
            self.peak = max(self.peak, self.live)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._record_emptied()

    def _is_view(self, result: Any, source: Any) -> bool:
        """Return whether an operation's result, or the first of several, shares the storage of its source."""
        if isinstance(result, (tuple, list)):
            result = result[0] if result else source
        if not isinstance(source, Tensor) or not isinstance(result, Tensor):
            return False
        if is_fake(result) and not is_fake(source):  # of a real tensor, such as a teacher's weight, in a trace
            return True

        source_storage = self._storage_of(source)
        result_storage = self._storage_of(result)
        if source_storage is None or result_storage is None:
            return False
        return storage_id(source_storage) == storage_id(result_storage)

    def _count(self, tensor: Tensor) -> int:
        """Count a tensor. Return the bytes that it adds: 0 if its storage is already counted, or does not count."""
        storage = self._storage_of(tensor)
        return 0 if storage is None else self._count_storage(storage)

    def _count_storage(self, storage: torch.UntypedStorage) -> int:
        key = storage_id(storage)
        if key in self._alive:
            return 0
        size = storage.nbytes()
        self._last_number += 1
        reference = weakref.ref(storage, lambda _: self._forget(key))  # called when the storage is freed
        self._alive[key] = _CountedStorage(self._last_number, size, reference)
        self.live += size
        self.events.append((self._last_number, size))
        return size

    def _forget(self, key: int) -> None:
        counted = self._alive.pop(key, None)
        if counted is not None:
            self.live -= counted.size
            self.events.append((counted.number, -counted.size))

    # --- what FSDP2 gathers, into storages that it frees and refills by resizing, without an operation

    def _count_gathered(self, tensors: list[Tensor]) -> int:
        """Count gathered parameters, whose values an operation has just copied there (torch 2.13,
        fsdp/_fully_shard/_fsdp_param.py). Return the bytes that they add.
        """
        # A storage that was refilled since it was counted has another size now.
        storages = [tensor.untyped_storage() for tensor in tensors]
        keys = [storage_id(storage) for storage in storages]
        for key, storage in zip(keys, storages, strict=True):
            if key in self._alive and self._alive[key].size != storage.nbytes():
                self._forget(key)
        added = sum(self._count(tensor) for tensor in tensors)

        # They form a group, which is emptied together; the same group may have been gathered before.
        self._gathered = [group for group in self._gathered if group != keys]
        self._gathered.append(keys)
        return added

    def _record_emptied(self) -> None:
        """Forget emptied storages. Looking at one per group is enough: FSDP2 empties a group at once."""
        for keys in list(self._gathered):
            if self._is_empty(keys[0]):
                self._gathered.remove(keys)
                for key in keys:
                    self._forget(key)

    def _is_empty(self, key: int) -> bool:
        """Return whether a storage that was counted is freed or empty."""
        counted = self._alive.get(key)
        storage = None if counted is None else counted.reference()
        return storage is None or storage.nbytes() == 0

    # --- which storages count

    def _storages_of(self, tensors: Iterable[Tensor], whole: bool = False) -> Iterator[torch.UntypedStorage]:
        """Yield the tensors' storages that count.

        Lazy, so that the caller's tensors are not kept alive: see `Buckets.existing`.

        Args:
            tensors: of any device.
            whole: only storages that a tensor covers completely.
        """
        for tensor in tensors:
            storage = self._storage_of(tensor)
            if storage is None or (whole and storage.nbytes() > local(tensor).nbytes):
                continue
            yield storage

    def _storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage that counts for the tensor, or None."""
        if self.devices is not None and tensor.device.type not in self.devices:
            return None
        if tensor.layout is not torch.strided:  # a sparse tensor's indices and values are counted instead
            return None
        return local(tensor).untyped_storage()
