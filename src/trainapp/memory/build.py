"""The choice of a device's memory class. It has its own file, so that the base class need not import its subclasses."""

import torch

from trainapp.config.schema import Memory
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.cuda import CudaMemory
from trainapp.memory.device import DeviceMemory
from trainapp.memory.mps import MpsMemory


def build_memory(settings: Memory, device: torch.device) -> DeviceMemory:
    """Build the device's memory and enforce `memory.limit`. Raises UserError for a limit above the device's memory."""
    classes = {"cpu": CpuMemory, "cuda": CudaMemory, "mps": MpsMemory}
    return classes[device.type](device, settings)
