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
        """Swap the averages into the model inside the block; copies shards one at a time."""
        with contextlib.ExitStack() as swapped:  # swaps back, even if memory ends at a shard's copy
            for pair in zip(self.weights, self.averages, strict=True):
                _exchange(*pair)
                swapped.callback(_exchange, *pair)
            yield


def _exchange(weight: Tensor, average: Tensor) -> None:
    """Swap two tensors; a shard by a copy, because FSDP gathers its memory, whatever `.data` of the DTensor is."""
    if not hasattr(weight, "device_mesh"):
        weight.data, average.data = average.data, weight.data
        return
    own, other = local_part(weight), local_part(average)
    kept = own.clone()
    own.copy_(other)
    other.copy_(kept)
