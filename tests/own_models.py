"""Models whose allocation has a size chosen by the test, and one with unusual blocks."""

import torch
from torch import Tensor, nn

from trainapp.models.gpt import GPT


class Scratch(nn.Module):
    """A linear model that also fills a buffer in every forward; the buffer's size does not depend on the batch."""

    def __init__(self, num_classes: int, scratch: int = 1):
        super().__init__()
        self.linear, self.scratch = nn.Linear(64, num_classes), scratch

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1)) + torch.zeros(self.scratch)[0]


class ScratchInEvaluation(Scratch):
    """The same, but only in evaluation."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1)) if self.training else super().forward(inputs)


class Widening(nn.Module):
    """A second layer of twice the width: at half the batch it requests what the first requested."""

    def __init__(self, num_classes: int, width: int = 64):
        super().__init__()
        self.last = nn.Linear(1, num_classes)
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        total = torch.zeros(len(inputs))
        for width in (self.width, 2 * self.width):
            total = total + torch.ones(len(inputs), width).sum(1)
        return self.last(total[:, None] * inputs.mean((1, 2, 3))[:, None])


class HeadInBlock(GPT):
    """Its head is one of the blocks."""

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), self.head]


class ScaledHead(GPT):
    """Its logits are scaled after the head, which a loss computed from features and head would not do."""

    def forward(self, inputs):
        return 0.1 * super().forward(inputs)
