"""CUDA memory: the caching allocator's counters."""

import contextlib
import gc
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainapp.config.schema import Memory
from trainapp.memory.device import DeviceMemory
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.live_tensors import Events, Kinds, Resident
from trainapp.parallel.dtensor import local
from trainapp.torch_private import memory_snapshot, start_memory_history, stop_memory_history

MAX_HISTORY = 200_000  # allocations and frees of one step that are recorded


class CudaMemory(DeviceMemory):
    """Reads the caching allocator's counters; the limit is the allocator's own cap."""

    def __init__(self, device: torch.device, settings: Memory):
        total = torch.cuda.get_device_properties(device).total_memory
        super().__init__(device, settings, total)
        torch.cuda.set_per_process_memory_fraction((self.limit or total) / total, device)
        torch.cuda.reset_peak_memory_stats(device)
        self._resident: list[tuple[MemoryKind, int, int]] = []  # kind, address, bytes
        self._kind_at: dict[int, MemoryKind] = {}  # by address, of tensors registered inside the block: its batches
        self._snapshot: dict[str, Any] | None = None

    @contextlib.contextmanager
    def watch(self, resident: Resident, track_modules: bool = True) -> Iterator[None]:
        """Records the allocator's history. The cap is enforced inside and outside the block."""
        if self.watching:
            self._kind_at |= {t.data_ptr(): kind for kind, tensors in resident.items() for t in map(local, tensors)}
            yield
            return
        self.watching, self._kind_at = True, {}
        start_memory_history(MAX_HISTORY)
        self._resident = [
            (kind, t.data_ptr(), t.nbytes) for kind, tensors in resident.items() for t in map(local, tensors)
        ]
        try:
            with self.module_path.watch() if track_modules else contextlib.nullcontext():
                yield
            if self.keep_events:
                self._snapshot = memory_snapshot(self.device)
        except BaseException:
            self._snapshot = memory_snapshot(self.device)
            raise
        finally:
            self.watching = False
            stop_memory_history()

    def events(self, gradients: Iterable[Tensor]) -> tuple[Events, Kinds]:
        """From the allocator's history of the last watched block that failed, or was recorded for a timeline.

        Resident tensors come first, as one allocation per kind with a negative number.
        """
        if self._snapshot is None:
            return [], {}
        kind_at = self._kind_at | {g.data_ptr(): MemoryKind.GRADIENTS for g in map(local, gradients)}
        totals: dict[MemoryKind, int] = {}
        for kind, _, size in self._resident:
            totals[kind] = totals.get(kind, 0) + size
        events = [(-1 - i, size) for i, size in enumerate(totals.values())]
        kinds = {-1 - i: kind for i, kind in enumerate(totals)}
        resident_at = {address: kind for kind, address, _ in self._resident}
        number_at: dict[int, int] = {}
        for number, entry in enumerate(self._snapshot["device_traces"][self.device.index or 0]):
            address = entry["addr"]
            if entry["action"] == "alloc":
                number_at[address] = number
                kinds[number] = kind_at.get(address, MemoryKind.ACTIVATIONS)
                events.append((number, entry["size"]))
            elif entry["action"] == "free_completed":
                freed = number_at.pop(address, None)
                if freed is None:  # allocated before the block
                    freed, kinds[number] = number, resident_at.get(address, MemoryKind.ACTIVATIONS)
                events.append((freed, -entry["size"]))
        return events, kinds

    def dump(self, path: Path) -> bool:
        """The allocator's snapshot of the last watched block, for the viewer at pytorch.org/memory_viz."""
        if self._snapshot is None:
            return False
        with path.open("wb") as file:
            pickle.dump(self._snapshot, file)
        return True

    def refused_allocations(self) -> int:
        """The allocator's count, which includes errors that cuDNN catches."""
        return torch.cuda.memory_stats_as_nested_dict(self.device).get("num_ooms", 0)

    def unused_cache(self) -> int:
        """Bytes reserved but not allocated."""
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def window(self) -> dict[str, float]:
        """The allocator's counters."""
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self._scalars(
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            stats["allocated_bytes.all.peak"],
            stats["reserved_bytes.all.peak"],
            stats["num_alloc_retries"],
        )

    def used(self) -> int:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated(self.device)

    def release(self) -> None:
        """Free reference cycles, then the allocator's cache."""
        self._note_peaks(torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device))
        gc.collect()
        torch.cuda.empty_cache()
