"""An exponential moving average of the weights, for evaluation (Polyak and Juditsky 1992)."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainapp.torch_private import local_part


class WeightAverage:
    """`average = decay * average + (1 - decay) * weights` after each optimizer step.

    With `decay` None, no average is kept.
    """

    def __init__(self, model: nn.Module, decay: float | None):
        self.names: list[str] = []
        self.weights: list[Tensor] = []
        if decay is not None:
            self._update = get_ema_multi_avg_fn(decay)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:  # as of now: a parameter that is frozen later keeps its average
                    self.names.append(name)
                    self.weights.append(parameter)
        self.averages = [weight.detach().clone() for weight in self.weights]
        self.step = 0  # of the weights that were averaged last

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

        Shards are copied through a buffer of the size of the largest one. The buffer stays allocated until the averages
        are swapped back, which therefore cannot run out of memory.
        """
        shards = [weight for weight in self.weights if _is_shard(weight)]
        buffers = _buffers_for(shards)
        with contextlib.ExitStack() as undo:  # swaps back, whatever happens inside
            for weight, average in zip(self.weights, self.averages, strict=True):
                _exchange(weight, average, buffers)
                undo.callback(_exchange, weight, average, buffers)
            yield


Buffers = dict[tuple[torch.device, torch.dtype], Tensor]


def _is_shard(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")


def _buffers_for(shards: list[Tensor]) -> Buffers:
    """Return a buffer of the largest shard's size by device and dtype."""
    largest_size: dict[tuple[torch.device, torch.dtype], int] = {}
    for shard in map(local_part, shards):
        key = (shard.device, shard.dtype)
        largest_size[key] = max(largest_size.get(key, 0), shard.numel())

    buffers = {}
    for (device, dtype), elements in largest_size.items():
        buffers[device, dtype] = torch.empty(elements, device=device, dtype=dtype)
    return buffers


def _exchange(weight: Tensor, average: Tensor, buffers: Buffers) -> None:
    """Swap two tensors. Shards are copied: FSDP gathers the memory of a shard, whatever `.data` of its DTensor is."""
    if not _is_shard(weight):
        weight.data, average.data = average.data, weight.data
        return

    weight_shard = local_part(weight)
    average_shard = local_part(average)
    buffer = buffers[weight_shard.device, weight_shard.dtype]
    copy_of_weight = buffer[: weight_shard.numel()].view(weight_shard.shape)
    copy_of_weight.copy_(weight_shard)
    weight_shard.copy_(average_shard)
    average_shard.copy_(copy_of_weight)
