"""CUDA memory: the caching allocator's counters."""

import contextlib
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainapp.config.schema import Memory
from trainapp.memory.device import DeviceMemory
from trainapp.memory.live_tensors import Resident
from trainapp.torch_private import memory_snapshot, record_memory_history
from trainapp.units import bytes_text

MAX_HISTORY = 20_000  # recorded allocations and frees, the last of a step; some KB of host memory each
MOST_FRAMES = 24  # of a stack in a snapshot, the innermost: whole stacks make a file of tens of MB
HEADROOM = 2**30  # bytes; for CUDA's context, library handles and NCCL, which allocate outside torch's allocator


def refused_allocations() -> int:
    """Return the number of failed allocations on the current device, including errors that were caught: the caching
    allocator's `num_ooms`. 0 before CUDA has started. Does not wait for kernels.

    The nested form is what C++ returns; `torch.cuda.memory_stats` also flattens and sorts two hundred counters.
    """
    return torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0)


def without_headroom(available: int) -> int:
    """Return the bytes that a run without a limit may use of those available: all but HEADROOM, or an eighth if that is
    less.
    """
    return available - min(HEADROOM, available // 8)


class CudaMemory(DeviceMemory):
    """CUDA memory: reads the caching allocator's counters; the limit is the allocator's own cap.

    Build it before anything is allocated for a run: it frees memory left by an earlier run in this process, and its cap
    also applies to the model. Without a limit the cap is the free memory less HEADROOM: the allocator stays intact
    after its own refusal, but maybe not after the driver's (see `detection.broken_part`).
    """

    def __init__(self, device: torch.device, settings: Memory):
        total = torch.cuda.get_device_properties(device).total_memory
        super().__init__(device, settings, total)

        # Free what an earlier run has left, and cap what this one may use.
        gc.collect()
        torch.cuda.empty_cache()
        self._cap = total
        self.enforce()
        torch.cuda.reset_peak_memory_stats(device)

        # Other backends (cudaMallocAsync, pluggable) do not support a history or a snapshot: torch 2.13,
        # c10/cuda/CUDAMallocAsyncAllocator.cpp.
        self._has_history = torch.cuda.get_allocator_backend() == "native"
        self._snapshot: dict[str, Any] | None = None
        # Highest peaks of the laps since the last window: the allocator's own restart with each lap.
        self._lap_peak = 0
        self._lap_peak_reserved = 0

    @property
    def enforced(self) -> int:
        return self._cap

    def enforce(self) -> None:
        """Set the cap to the limit or, without one, to the memory that is now reserved or free, less the headroom."""
        if self.limit is not None:
            self._cap = self.limit
        else:
            free, _ = torch.cuda.mem_get_info(self.device)
            available = free + torch.cuda.memory_reserved(self.device)
            self._cap = without_headroom(available)
        fraction = min(1.0, self._cap / self.total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def lap(self) -> tuple[int, int] | None:
        """Return allocated bytes. The limit bounds reserved bytes, so a size chosen by this may still fail."""
        peak = torch.cuda.max_memory_allocated(self.device)
        peak_reserved = torch.cuda.max_memory_reserved(self.device)
        self._lap_peak = max(self._lap_peak, peak)
        self._lap_peak_reserved = max(self._lap_peak_reserved, peak_reserved)
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device), peak

    @contextlib.contextmanager
    def measuring(self, resident: Resident) -> Iterator[None]:
        """Record the allocator's history, if supported, and take a snapshot of it if the block fails, or for a
        timeline. The cap is enforced inside and outside the block.
        """
        self._snapshot = None
        if not self._has_history:
            yield
            return
        record_memory_history(MAX_HISTORY)
        try:
            yield
            if self.keep_events:
                self._snapshot = memory_snapshot(self.device)
        except BaseException:
            self._snapshot = memory_snapshot(self.device)
            raise
        finally:
            record_memory_history(None)

    def dump(self, path: Path) -> bool:
        """Write the allocator's snapshot of the last watched block, for the viewer at pytorch.org/memory_viz."""
        snapshot = self._snapshot
        self._snapshot = None  # free it: it holds a Python stack for each entry
        if snapshot is None:
            return False
        _bound_stacks(snapshot)
        with path.open("wb") as file:
            pickle.dump(snapshot, file)
        return True

    def cache_flushes(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0)

    def others_text(self) -> str:
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        others = max(0, total - free - reserved)
        return (
            f"of the {bytes_text(total)} of {self.device} this run's allocator has {bytes_text(reserved)}, others and "
            f"libraries have {bytes_text(others)}, and {bytes_text(free)} are free. If none is, Windows and WSL move "
            "memory to the host instead of refusing it, which is slow: close what else uses the GPU, or set "
            "memory.limit"
        )

    def window(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

        # Each lap restarts the allocator's peaks: those of the window are the highest of them.
        peak = max(self._lap_peak, stats["allocated_bytes.all.peak"])
        peak_reserved = max(self._lap_peak_reserved, stats["reserved_bytes.all.peak"])
        self._lap_peak = 0
        self._lap_peak_reserved = 0
        return self._scalars(
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            peak,
            peak_reserved,
            stats["num_alloc_retries"],
        )

    def used(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        peak = torch.cuda.max_memory_allocated(self.device)
        peak_reserved = torch.cuda.max_memory_reserved(self.device)
        self._record_peaks(self._lap_peak, self._lap_peak_reserved)
        self._record_peaks(peak, peak_reserved)
        gc.collect()
        torch.cuda.empty_cache()
        # Pinned memory of the host, too: its allocator rounds to powers of two and gives nothing back by itself.
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # older versions lack it
        if empty_host_cache is not None:
            empty_host_cache()


def _bound_stacks(snapshot: dict[str, Any]) -> None:
    """Keep the innermost frames of each Python stack in an allocator's snapshot."""
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    for segment in snapshot["segments"]:
        entries += [segment, *segment.get("blocks", ())]
    for entry in entries:
        if "frames" in entry:
            entry["frames"] = entry["frames"][:MOST_FRAMES]
