"""Where the memory is: what is allocated, its peak, its limit, and the static part by kind.

One class for each kind of device, alike to their callers. Sizes are bytes. On CUDA they are the allocator's; on the
CPU they are live tensor storages, counted in watched steps only. The limit and the peak are in the same terms.
"""

import contextlib
import gc
import resource
import sys
from collections.abc import Iterable

import psutil
import torch
from torch import nn

from trainapp import config
from trainapp.errors import UserError
from trainapp.limits import LiveTensors


def static_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that stay from step to step, by kind. Gradients are counted as large as what they belong to."""
    parameters = list(model.parameters())
    return {
        "parameters": _size(parameters),
        "gradients": _size(p for p in parameters if p.requires_grad),
        "optimizer_state": _size(optimizer_tensors(optimizer)),
        "buffers": _size(model.buffers()),
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor in the optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def _size(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())  # tied weights share a storage


class DeviceMemory:
    """What all devices have in common. `limit` is None when the user set none; `total` is what there is."""

    def __init__(self, device: torch.device, settings: config.Memory, total: int):
        self.device, self.total = device, total
        self.limit = None if settings.limit is None else config.parse_memory_size(settings.limit, total)
        if self.limit is not None and self.limit > total:
            raise UserError(
                f"memory.limit={settings.limit}: {self.limit} bytes are more than the {total} bytes that {device} has"
            )
        self.peak = 0  # of the whole run
        self.out_of_memory_count = 0

    @property
    def budget(self) -> int:
        """The limit, or all there is."""
        return self.limit or self.total

    def watch(self, tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager:
        """Around a step whose size is unproven or which is logged; `tensors` are those alive at its start."""
        return contextlib.nullcontext()

    def window(self) -> dict[str, float]:
        """Scalars since the last call: allocated, peak, limit and so on. Resets the window's peak."""
        raise NotImplementedError

    def used(self) -> int:
        """Bytes in use now, or at the last moment that was watched."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back what nothing refers to any more: reference cycles first, then the allocator's cache."""
        gc.collect()

    def _scalars(self, allocated: int, reserved: int, peak: int, retries: int = 0) -> dict[str, float]:
        self.peak = max(self.peak, peak)
        return {
            "memory/allocated": allocated,
            "memory/reserved": reserved,
            "memory/peak": peak,
            "memory/limit": self.budget,
            "memory/percent_of_limit": 100 * peak / self.budget,
            "memory/fragmentation": 1 - allocated / reserved if reserved else 0.0,
            "memory/allocator_retries": retries,
            "memory/out_of_memory_count": self.out_of_memory_count,
        }


class CpuMemory(DeviceMemory):
    """Live tensor storages; the limit is enforced by counting them."""

    def __init__(self, device: torch.device, settings: config.Memory):
        super().__init__(device, settings, available_total())
        self._allocated = self._window_peak = 0

    @contextlib.contextmanager
    def watch(self, tensors: Iterable[torch.Tensor]):
        """Counts (and with a limit, enforces) from here to the end of the block."""
        counter = LiveTensors(self.limit)
        counter.register(tensors)
        try:
            with counter:
                yield
        finally:
            self._allocated, self._window_peak = counter.live, max(self._window_peak, counter.peak)
            self.peak = max(self.peak, counter.peak)

    def window(self) -> dict[str, float]:
        """The tensors alive at the end of the last watched step, and the window's peak."""
        scalars = self._scalars(self._allocated, self._allocated, self._window_peak)
        self._window_peak = 0
        return scalars

    def used(self) -> int:
        """Live bytes at the end of the last watched step."""
        return self._allocated


class CudaMemory(DeviceMemory):
    """The caching allocator's own counters; the limit is the allocator's cap."""

    def __init__(self, device: torch.device, settings: config.Memory):
        total = torch.cuda.get_device_properties(device).total_memory
        super().__init__(device, settings, total)
        torch.cuda.set_per_process_memory_fraction((self.limit or total) / total, device)
        torch.cuda.reset_peak_memory_stats(device)

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


class MpsMemory(DeviceMemory):
    """Apple's Metal: no peak is kept by the driver, so the current value stands for it."""

    def __init__(self, device: torch.device, settings: config.Memory):
        total = torch.mps.recommended_max_memory()
        super().__init__(device, settings, total)
        if self.limit:
            torch.mps.set_per_process_memory_fraction(self.limit / total)

    def window(self) -> dict[str, float]:
        """Metal's counters."""
        used = torch.mps.current_allocated_memory()
        return self._scalars(used, torch.mps.driver_allocated_memory(), used)

    def used(self) -> int:
        """Bytes allocated now."""
        return torch.mps.current_allocated_memory()

    def release(self) -> None:
        """Reference cycles, then the allocator's unused blocks."""
        gc.collect()
        torch.mps.empty_cache()


def build(settings: config.Memory, device: torch.device) -> DeviceMemory:
    """The device's memory, its limit in force from here on."""
    kinds = {"cpu": CpuMemory, "cuda": CudaMemory, "mps": MpsMemory}
    return kinds[device.type](device, settings)


def available_total() -> int:
    """Bytes of memory that this machine has, or the process's cgroup if that is less."""
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))  # "max" means no limit
    return total


class HostMemory:
    """The process's resident memory and its peak since the last call."""

    def __init__(self):
        self._process = psutil.Process()

    def window(self) -> dict[str, float]:
        """Bytes resident now, and the most since the last call (of the whole process where it cannot be reset)."""
        peak = self._peak()
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets VmHWM
        return {"memory/host_rss": self._process.memory_info().rss, "memory/host_rss_peak": peak}

    @staticmethod
    def _peak() -> int:
        with contextlib.suppress(OSError), open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
