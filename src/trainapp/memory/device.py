"""Where the memory is: what is allocated, its peak, its limit, and the static part by kind.

Sizes are bytes. On CUDA they are the allocator's; on the CPU they are live tensor storages, counted in watched steps
only. The limit and the peak are in the same terms.
"""

import contextlib
import gc
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from torch import nn

from trainapp.config import schema
from trainapp.errors import UserError
from trainapp.memory.live_tensors import ModulePath, Resident
from trainapp.parallel.dtensor import local
from trainapp.units import parse_memory_size


def static_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, averages: list[torch.Tensor]) -> dict[str, int]:
    """Bytes that stay from step to step, by kind. Gradients are counted as large as what they belong to."""
    parameters = list(model.parameters())
    return {
        "parameters": _size(parameters),
        "gradients": _size(p for p in parameters if p.requires_grad),
        "optimizer_state": _size(optimizer_tensors(optimizer)),
        "buffers": _size(model.buffers()),
        "weight_average": _size(averages),
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor in the optimizer's state."""
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def _size(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in map(local, tensors)}
    return sum(storages.values())  # tied weights share a storage


class DeviceMemory:
    """What all devices have in common. `limit` is None when the user set none; `total` is what there is."""

    def __init__(self, device: torch.device, settings: schema.Memory, total: int):
        self.device, self.total = device, total
        self.limit = None if settings.limit is None else parse_memory_size(settings.limit, total)
        if self.limit is not None and self.limit > total:
            raise UserError(
                f"memory.limit={settings.limit}: {self.limit} bytes are more than the {total} bytes that {device} has"
            )
        self.peak = 0  # of the whole run
        self.out_of_memory_count = 0
        self.module_path = ModulePath()
        self.watching = False
        self.keep_events = False  # of a healthy step, too: for its picture

    @property
    def budget(self) -> int:
        """The limit, or all there is."""
        return self.limit or self.total

    @property
    def wants_look(self) -> bool:
        """Whether a logged step should be watched to know what it uses, though its size is proven."""
        return False

    def watch(self, resident: Resident, where: bool = True) -> contextlib.AbstractContextManager:
        """Around work of an unproven size, or which is logged; `resident` is what is in memory before it.

        where: also know in which module memory runs out in a backward: hooks in every module cost as much as counting.
        """
        return contextlib.nullcontext()

    def events(self, gradients: Iterable[torch.Tensor]) -> tuple[list[tuple[int, int]], dict[int, str]]:
        """Allocations and frees of the last watched block and the kinds of their storages, for `timeline`."""
        return [], {}

    def dump(self, path: Path) -> bool:
        """Write the allocator's own record of the last watched block; False where it keeps none."""
        return False

    def unused_cache(self) -> int:
        """Bytes that the allocator holds and nobody uses: giving them back may be all that a retry needs."""
        return 0

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


def available_total() -> int:
    """Bytes of memory that this machine has, or the process's cgroup if that is less."""
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total = min(total, int(file.read()))  # "max" means no limit
    return total


class HostMemory:
    """The process's resident memory and its peak since the last call."""

    def window(self) -> dict[str, float]:
        """Bytes resident now, and the most since the last call (of the whole process where it cannot be reset)."""
        with contextlib.suppress(OSError, KeyError), open("/proc/self/status") as file:
            sizes = dict(line.split(":", 1) for line in file)
            resident, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")  # resets VmHWM
            return {"memory/host_rss": resident, "memory/host_rss_peak": peak}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"memory/host_rss": psutil.Process().memory_info().rss, "memory/host_rss_peak": peak}
