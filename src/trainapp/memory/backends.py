"""Chooses the class that measures and limits a device's memory."""

from collections.abc import Callable

import torch

from trainapp.config.schema import Memory
from trainapp.memory.cpu import CpuMemory
from trainapp.memory.cuda import CudaMemory
from trainapp.memory.device import DeviceMemory
from trainapp.memory.mps import MpsMemory

_BACKENDS: dict[str, Callable[[torch.device, Memory], DeviceMemory]] = {
    "cpu": CpuMemory,
    "cuda": CudaMemory,
    "mps": MpsMemory,
}


def build(settings: Memory, device: torch.device) -> DeviceMemory:
    """The device's memory, with `memory.limit` enforced. Raises UserError for a limit above what the device has."""
    return _BACKENDS[device.type](device, settings)
