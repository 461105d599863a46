"""Counts live CPU tensors by category, enforces a limit on them, and draws what it has counted.

The CPU's allocator has no limit, and reaching the system's (RLIMIT_DATA) can crash oneDNN.
Counting live storages in a dispatch mode is exact and repeatable, and an error raised from it leaves autograd intact.
It costs about 8 microseconds per operation, so it is enabled only while a size is unvalidated and in logged steps.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainapp.files import atomic_write
from trainapp.torch_private import (
    ASKS_DEVICE,
    LIFT,
    DispatchMode,
    ForwardModuleTracker,
    is_fake,
    local,
    may_view,
    storage_id,
)
from trainapp.units import bytes_text

LEAST_KEPT = 64  # bytes; ignores scalars, of which a run retains a few at other times than a trace


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
Kinds = dict[int, Category]  # by storage number; a number without a category is an activation


class MemoryLimitExceeded(torch.OutOfMemoryError):
    """The live tensors exceed `memory.limit`. Sizes are in bytes. category: of tensors that existed before the work and
    exceed it by themselves; None for what an operation has made.
    """

    def __init__(self, operation: str, requested: int, used: int, limit: int, category: Category | None = None):
        super().__init__(
            f"memory.limit: {operation} tried to allocate {bytes_text(requested)} with {bytes_text(used)} "
            f"of {bytes_text(limit)} in use"
        )
        self.operation, self.requested, self.used, self.limit = operation, requested, used, limit
        self.category = category


class _Counted(NamedTuple):
    number: int
    size: int
    storage: "weakref.ref[torch.UntypedStorage]"  # counting must not keep anything alive


class LiveTensors(DispatchMode):
    """While active, counts the bytes of the storages that operations create, until they are freed.

    limit: bytes, or None to only count. devices: device types to count, None for all. before: the counter of the
    previous work, whose surviving tensors `register_kept` counts.
    Attributes: `live` and `peak`, in bytes, including registered tensors; `events` and `kinds`, the record of every
    allocation and free.
    """

    def __init__(
        self,
        limit: int | None = None,
        devices: tuple[str, ...] | None = ("cpu",),
        before: "LiveTensors | None" = None,
    ):
        super().__init__()
        self.limit, self.devices = limit, devices
        self.live = self.peak = 0
        self.events: Events = []
        self.kinds: Kinds = {}
        self._alive: dict[int, _Counted] = {}  # by storage_id
        self._gathered: list[list[int]] = []  # keys of storages that FSDP fills and empties together
        self._number = 0
        self._kept = [] if before is None else before._surviving()

    def register(self, resident: Resident) -> None:
        """Count tensors that already exist. Raises MemoryLimitExceeded if these exceed the limit.

        A batch that is a view of a larger tensor does not count: the latter belongs to a data set.
        """
        for kind, tensors in resident.items():
            self._register(kind, self._storages_of(tensors, whole=kind is Category.BATCH))

    def register_kept(self) -> None:
        """Count tensors retained from earlier work, after `register`. Raises like `register`."""
        kept = [storage for reference in self._kept if (storage := reference()) is not None]
        self._register(Category.KEPT, (storage for storage in kept if storage_id(storage) not in self._alive))
        self._kept = []

    def _register(self, kind: Category, storages: Iterable[torch.UntypedStorage]) -> None:
        before, first = self.live, len(self.events)
        for storage in storages:
            self._count_storage(storage)
            self._label(kind, storage)
        if self.live > before:  # one event per category: they existed from the start
            self.events[first:] = [(self._number, self.live - before)]
        if self.limit is not None and self.live > self.limit:
            raise MemoryLimitExceeded(f"the {kind.label}", self.live - before, before, self.limit, kind)
        self.peak = max(self.peak, self.live)

    def _surviving(self) -> list["weakref.ref[torch.UntypedStorage]"]:
        """Counted or retained storages that still exist, except those gathered by FSDP, which it empties unseen."""
        gathered = {key for group in self._gathered for key in group}
        counted = [own for key, own in list(self._alive.items()) if key not in gathered]
        return [*self._kept, *(own.storage for own in counted if own.size >= LEAST_KEPT)]

    def label(self, kind: Category, tensor: Tensor) -> None:
        """Set the category of a live tensor; no effect if it is not counted."""
        if tensor.layout is torch.strided:
            self._label(kind, local(tensor).untyped_storage())

    def _label(self, kind: Category, storage: torch.UntypedStorage) -> None:
        counted = self._alive.get(storage_id(storage))
        if counted is not None:
            self.kinds[counted.number] = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        if self._gathered:
            self._note_emptied()
        result = func(*args, **(kwargs or {}))
        if may_view(func) and args and func is not LIFT and self._is_view(result, args[0]):  # its base may not count
            return result
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
        """Bytes that FSDP2 has gathered into storages that it frees and refills by resizing, without an operation
        (torch 2.13, fsdp/_fully_shard/_fsdp_param.py); copying the values is one.
        """
        storages = [tensor.untyped_storage() for tensor in tensors]
        keys = [storage_id(storage) for storage in storages]
        for key, storage in zip(keys, storages, strict=True):
            if key in self._alive and self._alive[key].size != storage.nbytes():
                self._forget(key)
        added = sum(self._count(tensor) for tensor in tensors)
        self._gathered = [group for group in self._gathered if group != keys]
        self._gathered.append(keys)
        return added

    def _note_emptied(self) -> None:
        """Note emptied storages. One per group is enough: FSDP2 empties a group at once."""
        for group in list(self._gathered):
            storage = self._alive[group[0]].storage() if group[0] in self._alive else None
            if storage is None or not storage.nbytes():
                self._gathered.remove(group)
                for key in group:
                    self._forget(key)

    def _forget(self, key: int) -> None:
        if (found := self._alive.pop(key, None)) is not None:
            self.live -= found.size
            self.events.append((found.number, -found.size))

    def _is_view(self, result: Any, source: Any) -> bool:
        if isinstance(result, (tuple, list)):
            result = result[0] if result else source
        if not isinstance(source, Tensor) or not isinstance(result, Tensor):
            return False
        if is_fake(result) and not is_fake(source):  # of a real tensor, such as a teacher's weight, in a trace
            return True
        storages = self._storage_of(source), self._storage_of(result)
        return None not in storages and storage_id(storages[0]) == storage_id(storages[1])

    def _storages_of(self, tensors: Iterable[Tensor], whole: bool = False) -> Iterator[torch.UntypedStorage]:
        """The tensors' storages that count. whole: only storages that a tensor covers completely.

        Lazy, so that the caller's tensors are not kept alive: see `Buckets.existing`.
        """
        for tensor in tensors:
            storage = self._storage_of(tensor)
            if storage is not None and not (whole and storage.nbytes() > local(tensor).nbytes):
                yield storage

    def _storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The storage that counts for the tensor, if one does."""
        if self.devices is not None and tensor.device.type not in self.devices:
            return None
        if tensor.layout is not torch.strided:  # a sparse tensor's indices and values are counted instead
            return None
        return local(tensor).untyped_storage()

    def _count(self, tensor: Tensor) -> int:
        """Bytes that this tensor adds: 0 if its storage is already counted."""
        storage = self._storage_of(tensor)
        return 0 if storage is None else self._count_storage(storage)

    def _count_storage(self, storage: torch.UntypedStorage) -> int:
        key = storage_id(storage)
        if key in self._alive:
            return 0
        size = storage.nbytes()
        number = self._number = self._number + 1
        self._alive[key] = _Counted(number, size, weakref.ref(storage, lambda _: self._forget(key)))
        self.live += size
        self.events.append((number, size))
        return size


class ModulePath:
    """The module that is running, in forward or backward, and the one in which an error was raised."""

    def __init__(self) -> None:
        self.at_failure = ""  # "" without a failure
        self._tracker: ForwardModuleTracker | None = None

    @property
    def running(self) -> str:
        """The innermost running module, by its name in the whole model; "" outside all modules."""
        names = self._tracker.parents if self._tracker else ()
        return max(names, key=lambda name: name.count("."), default="").partition(".")[2]  # after the model's class

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Use around forward and backward. Costs a few microseconds per module."""
        with ForwardModuleTracker() as self._tracker:
            try:
                yield
            except BaseException:
                self.at_failure = self.running
                raise
            finally:
                self._tracker = None


# --- the picture

KINDS: tuple[Category, ...] = tuple(kind for kind in Category if kind is not Category.OUTSIDE_ALLOCATOR)


def stacked(events: Sequence[tuple[int, int]], kinds: Mapping[int, Category]) -> dict[Category, np.ndarray]:
    """Bytes by category after each event; all arrays have the length of `events`.

    events: `(storage number, bytes)`, negative when freed. kinds: by storage number; storages without a kind are
    activations.
    """
    changes: dict[Category, np.ndarray] = {kind: np.zeros(len(events), dtype=np.int64) for kind in KINDS}
    for position, (number, size) in enumerate(events):
        changes[kinds.get(number, Category.ACTIVATIONS)][position] = size
    return {kind: values.cumsum() for kind, values in changes.items()}


@dataclass(frozen=True)
class Picture:
    """What to draw. events, kinds: as in `stacked`. limit: bytes, drawn as a line unless far above the peak."""

    events: Sequence[tuple[int, int]]
    kinds: Mapping[int, Category]
    limit: int
    title: str
    path: Path  # of the PNG file


def draw(picture: Picture) -> None:
    """Draw it to its file, as a PNG: half a second. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: half a second more
    from matplotlib.figure import Figure

    series = stacked(picture.events, picture.kinds)
    total = np.sum(list(series.values()), axis=0)
    scale = 2**20
    figure = Figure(figsize=(10, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = [kind for kind in KINDS if series[kind].max(initial=0) > 0]
    axes.stackplot(
        np.arange(len(picture.events)),
        [series[kind] / scale for kind in shown],
        labels=[f"{kind.label} ({bytes_text(int(series[kind].max()))})" for kind in shown],
        colors=[f"C{KINDS.index(kind)}" for kind in shown],  # one color per kind in every picture
        step="post",
    )
    highest = int(total.max(initial=0))
    if picture.limit < 3 * highest:
        label = f"limit ({bytes_text(picture.limit)})"
        axes.axhline(picture.limit / scale, color="black", linestyle="--", label=label)
    last = max(1, len(picture.events) - 1)
    axes.set(title=picture.title, xlabel="allocations and frees, in order", ylabel="MiB", xlim=(0, last))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    with atomic_write(picture.path, "wb") as file:
        canvas.print_png(file)
