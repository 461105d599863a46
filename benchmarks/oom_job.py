"""The workload of `other_trainers.py`: data with sample ids, and a loss that records which samples were trained.

Like most text data sets it has short sequences and a few long ones, so memory runs out in the middle of the epoch.
"""

import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainapp.data.sets.synthetic import SyntheticTokens
from trainapp.losses import losses
from trainapp.memory.live_tensors import LiveTensors, MemoryLimitExceeded
from trainapp.models.gpt import GPT
from trainapp.validation import NonNegativeInt, PositiveInt


class LongTail(SyntheticTokens):
    """SyntheticTokens with sequences of `short` tokens, except every `rarity`-th, which fills the context.

    Batches also hold "ids", int64 [B]: the sample indices.
    """

    def __init__(
        self,
        split: Literal["train", "val"],
        seed: NonNegativeInt = 0,
        size: PositiveInt = 640,
        val_size: PositiveInt = 128,
        vocab_size: PositiveInt = 256,
        context_length: PositiveInt = 256,
        min_length: None = None,
        short: PositiveInt = 32,
        rarity: PositiveInt = 160,
    ):
        super().__init__(split, seed, size, val_size, vocab_size, context_length)
        self.short, self.rarity = short, rarity

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The collated batch of these sequences, padded to the longest."""
        batch, positions = super().__getitems__(indices), self._positions(indices)
        lengths = torch.from_numpy(np.where(positions % self.rarity, self.short, self.context_length))
        longest = int(lengths.max())
        padding = torch.arange(longest) >= lengths[:, None]
        inputs, targets = (batch[name][:, :longest] for name in ("inputs", "targets"))
        return {
            "inputs": inputs.masked_fill(padding, 0),
            "targets": targets.masked_fill(padding, losses.IGNORED),
            "ids": torch.from_numpy(positions),
        }


class DrawRecord:
    """Records every optimizer step, its samples and its model, independently of what a trainer reports.

    A sample belongs to a step if its gradient was in the parameters when the optimizer stepped.
    """

    def __init__(self):
        self.steps: list[tuple[int, list[int]]] = []  # (model number, sample ids)
        self._models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._pending: tuple[int, list[int]] = (0, [])
        register_optimizer_step_post_hook(self._stepped)

    def saw(self, model: nn.Module, ids: Tensor) -> None:
        """Record that the gradients of these samples will be added to the current ones."""
        if model not in self._models:
            self._models[model] = next(self._numbers)
        number = self._models[model]
        if all(p.grad is None for p in model.parameters()):
            self._pending = (number, [])
        self._pending[1].extend(ids.tolist())

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._pending[1]:  # empty in the step that only allocates optimizer state
            self.steps.append(self._pending)
        self._pending = (0, [])


@functools.cache
def draw_record() -> DrawRecord:
    """The draw_record of this process."""
    return DrawRecord()


def next_token(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, losses.Metrics]:
    """trainapp's next-token loss, recorded in the draw_record."""
    if torch.is_grad_enabled():
        draw_record().saw(model, batch["ids"])
    return losses.next_token(model, batch)


def build_model(spec: Mapping[str, int], **arguments: Any) -> GPT:
    """The model for a plain script, with the same initial weights as in trainapp."""
    torch.manual_seed(0)
    return GPT(**spec, **arguments)


@torch.no_grad()
def evaluate(model: nn.Module, data: SyntheticTokens, size: int) -> float:
    """The mean loss per token."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(data), size):
        loss, tokens, _ = losses.next_token(model, data.__getitems__(range(start, min(len(data), start + size))))
        total, count = total + float(loss), count + int(tokens)
    model.train()
    return total / count


class Limit(LiveTensors):
    """`memory.limit` for any code, with an error message that other trainers recognise, too.

    `peak` includes the refused allocation, which existed briefly.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except MemoryLimitExceeded as error:
            self.peak = max(self.peak, self.live)
            raise torch.OutOfMemoryError(f"CPU out of memory. {error}") from None
