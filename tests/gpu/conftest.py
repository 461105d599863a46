"""The allocator's settings are those of the program: `trainapp.launch` runs before anything imports torch.

torch reads some of them while it is imported (2.13, c10/cuda/CUDAAllocatorConfig.h), cuBLAS before the first matmul.
"""

import tempfile
from pathlib import Path

import pytest

from trainapp.config import compose
from trainapp.launch import launch

# Whether there is a driver, without asking torch; WSL has the last one.
if any(Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")):
    with tempfile.TemporaryDirectory() as folder:
        tiny = ("model=mlp", "model.width=16", "train.device=cpu", "train.max_steps=1", "every.eval=null")
        quiet = ("checkpointing=off", "oom.remember=false", "memory.guard=false", "train.deterministic=true")
        launch.launch(compose.from_command_line([*tiny, *quiet], folder))

import torch
from on_gpu import forget

torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def clean_device():
    """No memory and no cap of earlier tests."""
    if torch.cuda.is_available():
        forget()
    yield
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(False)
        forget()
