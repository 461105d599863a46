"""Chooses the class that measures and limits a device's memory."""

import gc
from collections.abc import Callable

import torch

from trainapp.config.schema import Memory
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.cuda import CudaMemory
from trainapp.memory.device import DeviceMemory


class MpsMemory(DeviceMemory):
    """Metal's driver keeps no peak, so the current value is reported in its place."""

    def __init__(self, device: torch.device, settings: Memory):
        total = torch.mps.recommended_max_memory()
        super().__init__(device, settings, total)
        if self.limit:
            torch.mps.set_per_process_memory_fraction(self.limit / total)

    def window(self) -> dict[str, float]:
        """Metal's counters."""
        used, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return self._scalars(used, reserved, used, reserved)

    def used(self) -> int:
        """Bytes allocated now."""
        return torch.mps.current_allocated_memory()

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        torch.mps.synchronize()

    def release(self) -> None:
        """Free reference cycles, then the allocator's cache."""
        gc.collect()
        torch.mps.empty_cache()


_BACKENDS: dict[str, Callable[[torch.device, Memory], DeviceMemory]] = {
    "cpu": CpuMemory,
    "cuda": CudaMemory,
    "mps": MpsMemory,
}


def build(settings: Memory, device: torch.device) -> DeviceMemory:
    """The device's memory, with `memory.limit` enforced. Raises UserError for a limit above what the device has."""
    return _BACKENDS[device.type](device, settings)
