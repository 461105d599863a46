"""Memory of CUDA: the caching allocator's counters."""

import contextlib
import gc
import pickle
from collections.abc import Iterable
from pathlib import Path

import torch

from trainapp.config import schema
from trainapp.memory.device import DeviceMemory
from trainapp.memory.live_tensors import Resident
from trainapp.parallel.dtensor import local


class CudaMemory(DeviceMemory):
    """The caching allocator's own counters; the limit is the allocator's cap."""

    def __init__(self, device: torch.device, settings: schema.Memory):
        total = torch.cuda.get_device_properties(device).total_memory
        super().__init__(device, settings, total)
        torch.cuda.set_per_process_memory_fraction((self.limit or total) / total, device)
        torch.cuda.reset_peak_memory_stats(device)
        self._resident: list[tuple[str, int, int]] = []
        self._kinds: dict[int, str] = {}  # by address, of what a watched step was told of later: its batches
        self._snapshot: dict | None = None

    @contextlib.contextmanager
    def watch(self, resident: Resident, where: bool = True):
        """The allocator enforces its cap by itself; the peak is read at the end."""
        if self.watching:
            self._kinds |= {t.data_ptr(): kind for kind, tensors in resident.items() for t in map(local, tensors)}
            yield
            return
        self.watching, self._kinds = True, {}
        torch.cuda.memory._record_memory_history(max_entries=200_000, context="alloc", stacks="python")
        self._resident = [
            (kind, t.data_ptr(), t.nbytes) for kind, tensors in resident.items() for t in map(local, tensors)
        ]
        try:
            with self.module_path.watch() if where else contextlib.nullcontext():
                yield
            if self.keep_events:
                self._snapshot = torch.cuda.memory._snapshot(self.device)
        except BaseException:
            self._snapshot = torch.cuda.memory._snapshot(self.device)
            raise
        finally:
            self.watching = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def events(self, gradients: Iterable[torch.Tensor]) -> tuple[list[tuple[int, int]], dict[int, str]]:
        """From the allocator's own history of the last watched block."""
        if self._snapshot is None:
            return [], {}
        kinds_at = self._kinds | {g.data_ptr(): "gradients" for g in map(local, gradients)}
        totals: dict[str, int] = {}
        for kind, _, size in self._resident:
            totals[kind] = totals.get(kind, 0) + size
        events = [(-1 - i, size) for i, size in enumerate(totals.values())]
        kinds = {-1 - i: kind for i, kind in enumerate(totals)}
        address_kind = {address: kind for kind, address, _ in self._resident}
        numbers: dict[int, int] = {}
        for number, entry in enumerate(self._snapshot["device_traces"][self.device.index or 0]):
            if entry["action"] == "alloc":
                numbers[entry["addr"]] = number
                kinds[number] = kinds_at.get(entry["addr"], "activations")
                events.append((number, entry["size"]))
            elif entry["action"] == "free_completed":
                known = numbers.pop(entry["addr"], None)
                if known is None:
                    known, kinds[number] = number, address_kind.get(entry["addr"], "activations")
                events.append((known, -entry["size"]))
        return events, kinds

    def dump(self, path: Path) -> bool:
        """The allocator's snapshot of the last watched block, for the viewer at pytorch.org/memory_viz."""
        if self._snapshot is None:
            return False
        with path.open("wb") as file:
            pickle.dump(self._snapshot, file)
        return True

    def unused_cache(self) -> int:
        """Reserved, but not allocated."""
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def window(self) -> dict[str, float]:
        """The allocator's counters."""
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self._scalars(
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            stats["allocated_bytes.all.peak"],
            stats["num_alloc_retries"],
        )

    def used(self) -> int:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated(self.device)

    def release(self) -> None:
        """Reference cycles, then the allocator's unused blocks."""
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
        gc.collect()
        torch.cuda.empty_cache()
