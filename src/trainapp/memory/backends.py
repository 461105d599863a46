"""The memory of each kind of device: how it is watched, limited and measured. One class for each, alike to callers."""

import torch

from trainapp.config import schema
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.cuda import CudaMemory
from trainapp.memory.device import DeviceMemory
from trainapp.memory.mps import MpsMemory


def build(settings: schema.Memory, device: torch.device) -> DeviceMemory:
    """The device's memory, its limit in force from here on."""
    kinds = {"cpu": CpuMemory, "cuda": CudaMemory, "mps": MpsMemory}
    return kinds[device.type](device, settings)
