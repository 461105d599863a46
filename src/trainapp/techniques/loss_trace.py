"""What a micro-batch needs besides forward and backward of its model: read from its loss on tensors without data."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.memory.live_tensors import LiveTensors
from trainapp.techniques.block_trace import Skeleton
from trainapp.techniques.compiled_budget import LossMemory
from trainapp.torch_private import storage_id


def loss_memory(skeleton: Skeleton, batch: Any, autocast: contextlib.AbstractContextManager[Any]) -> LossMemory:
    """The bytes of the batch, and what the loss and its gradient add to what the model returns.

    The model runs without a graph of its own, and the backward ends at its outputs. Raises whatever the model and the
    task raise on tensors without data.
    """
    counter, base = LiveTensors(devices=None), 0

    def without_graph(module: nn.Module, inputs: Any) -> None:
        torch.set_grad_enabled(False)

    def as_leaves(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        nonlocal base
        torch.set_grad_enabled(True)
        counter.peak = base = counter.live
        return map_tensors(_leaf, outputs)

    with skeleton.running(batch, lambda index, block, forward: forward) as (model, fake), torch.enable_grad():
        hooks = [model.register_forward_pre_hook(without_graph), model.register_forward_hook(as_leaves)]
        try:
            skeleton.forward_and_backward(fake, autocast, counter)
        finally:
            for hook in hooks:
                hook.remove()
        storages = {storage_id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors_in(fake)}
    return LossMemory(sum(storages.values()), counter.peak - base)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
