"""Models with an allocation of a size that a test chooses."""

import torch
from torch import Tensor, nn


class Scratch(nn.Module):
    """A linear model that also fills a buffer, whose size does not depend on the batch, in every forward."""

    def __init__(self, num_classes: int, scratch: int = 1):
        super().__init__()
        self.linear, self.scratch = nn.Linear(64, num_classes), scratch

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1)) + torch.zeros(self.scratch)[0]


class ScratchInEvaluation(Scratch):
    """The same in evaluation alone."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1)) if self.training else super().forward(inputs)


class Widening(nn.Module):
    """A second layer of twice the width: at half the batch it asks for what the first asked for."""

    def __init__(self, num_classes: int, width: int = 64):
        super().__init__()
        self.last = nn.Linear(1, num_classes)
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        total = torch.zeros(len(inputs))
        for width in (self.width, 2 * self.width):
            total = total + torch.ones(len(inputs), width).sum(1)
        return self.last(total[:, None] * inputs.mean((1, 2, 3))[:, None])
