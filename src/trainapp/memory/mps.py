"""The memory of Apple's GPUs."""

import gc

import torch

from trainapp.config.schema import Memory
from trainapp.memory.device import DeviceMemory


class MpsMemory(DeviceMemory):
    """Metal's memory. Its driver keeps no peak, so the current value is reported instead."""

    def __init__(self, device: torch.device, settings: Memory):
        total = torch.mps.recommended_max_memory()
        super().__init__(device, settings, total)
        if self.limit:
            torch.mps.set_per_process_memory_fraction(self.limit / total)

    def window(self) -> dict[str, float]:
        used = torch.mps.current_allocated_memory()
        reserved = torch.mps.driver_allocated_memory()
        return self._scalars(used, reserved, used, reserved)

    def used(self) -> int:
        return torch.mps.current_allocated_memory()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.mps.empty_cache()
