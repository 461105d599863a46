"""What a forward and backward would use, without using it: traced with fake tensors, which have shapes and no data.

On the CPU the traced peak equals the measured one to the byte; on CUDA the allocator adds its rounding and workspaces.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from trainapp import torch_private
from trainapp.data.batch import map_tensors
from trainapp.memory.kinds import MemoryKind
from trainapp.memory.live_tensors import LiveTensors
from trainapp.train.losses import Task


def traced_peak(
    model: nn.Module,
    task: Task,
    batch: Any,
    autocast: contextlib.AbstractContextManager | None = None,
    change: Callable[[nn.Module], None] = lambda model: None,
) -> int:
    """Bytes that forward and backward of `batch` need at their peak beyond parameters and buffers, gradients included.

    change: applied to the traced copy of the model first, to see what it would bring.
    Raises whatever the model raises on tensors without data: not every model can be traced.
    """
    mode = torch_private.fake_tensor_mode()
    fakes: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = mode.from_tensor(parameter.detach())
        fakes[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    for buffer in model.buffers():
        fakes[id(buffer)] = mode.from_tensor(buffer)
    twin = copy.deepcopy(model, fakes)
    change(twin)
    fake_batch = map_tensors(mode.from_tensor, batch)
    counter = LiveTensors(devices=None)
    counter.register({MemoryKind.PARAMETERS: twin.parameters(), MemoryKind.BUFFERS: twin.buffers()})
    static = counter.live
    with mode, counter:
        with autocast or contextlib.nullcontext():
            loss, _, _ = task(twin, fake_batch)
        loss.backward()
    return counter.peak - static
