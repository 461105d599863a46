"""An exponential moving average of the weights, for evaluation (Polyak and Juditsky 1992)."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainapp.torch_private import local_part


class WeightAverage:
    """`average = decay * average + (1 - decay) * weights` after each optimizer step. `decay` None: keeps no average."""

    def __init__(self, model: nn.Module, decay: float | None):
        self._update = get_ema_multi_avg_fn(1.0 if decay is None else decay)
        named = [] if decay is None else [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]  # as of now: what is frozen later keeps its average
        self.weights: list[Tensor] = [weight for _, weight in named]
        self.averages = [p.detach().clone() for p in self.weights]
        self.step = 0

    def catch_up(self, step: int) -> None:
        """Update the average with the weights of `step`. Repeated calls for one step have no effect."""
        if self.step != step and self.weights:
            self._update(self.averages, self.weights, 0)  # in place: cannot run out of memory
        self.step = step

    @torch.no_grad()
    def start_at_weights(self) -> None:
        """Reset the average to the current weights."""
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.copy_(weight)

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Swap the averages into the model inside the block.

        Shards are copied, by way of a buffer of the largest one, which is held meanwhile: swapping back needs no memory
        that might be missing then.
        """
        pairs = list(zip(self.weights, self.averages, strict=True))
        buffers = _buffers_for([weight for weight in self.weights if _is_shard(weight)])
        with contextlib.ExitStack() as swapped:  # swaps back, whatever happens inside
            for weight, average in pairs:
                _exchange(weight, average, buffers)
                swapped.callback(_exchange, weight, average, buffers)
            yield


Buffers = dict[tuple[torch.device, torch.dtype], Tensor]


def _is_shard(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")


def _buffers_for(shards: list[Tensor]) -> Buffers:
    """Return a buffer of the largest shard's size by device and dtype."""
    largest: dict[tuple[torch.device, torch.dtype], int] = {}
    for shard in map(local_part, shards):
        key = (shard.device, shard.dtype)
        largest[key] = max(largest.get(key, 0), shard.numel())
    return {(device, dtype): torch.empty(size, device=device, dtype=dtype) for (device, dtype), size in largest.items()}


def _exchange(weight: Tensor, average: Tensor, buffers: Buffers) -> None:
    """Swap two tensors; a shard by a copy, because FSDP gathers its memory, whatever `.data` of the DTensor is."""
    if not _is_shard(weight):
        weight.data, average.data = average.data, weight.data
        return
    weight_shard = local_part(weight)
    average_shard = local_part(average)
    copy_of_weight = buffers[weight_shard.device, weight_shard.dtype][: weight_shard.numel()].view(weight_shard.shape)
    copy_of_weight.copy_(weight_shard)
    weight_shard.copy_(average_shard)
    average_shard.copy_(copy_of_weight)
