"""Memory of Apple's Metal."""

import gc

import torch

from trainapp.config import schema
from trainapp.memory.device import DeviceMemory


class MpsMemory(DeviceMemory):
    """Apple's Metal: no peak is kept by the driver, so the current value stands for it."""

    def __init__(self, device: torch.device, settings: schema.Memory):
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
