"""Models whose memory in a run is not that of their trace, which runs on fake tensors."""

import torch
from torch import Tensor, nn

from trainapp.torch_private import is_tracing


class Net(nn.Module):
    """A linear layer that keeps `extra` numbers per sample from forward to backward."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.last = nn.Linear(64, num_classes)
        self.scale = nn.Parameter(torch.ones(()))

    def extra(self, inputs: Tensor) -> int:
        """Numbers per sample."""
        return 1000

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        numbers = self.extra(flat)
        if not numbers:
            return self.last(flat)
        kept = flat.new_ones(len(flat), numbers) * self.scale
        return self.last(flat) + (kept * kept).mean(1, keepdim=True)


class Hungrier(Net):
    """Keeps half as much again when it runs for real."""

    def extra(self, inputs: Tensor) -> int:
        return 1000 if is_tracing() else 1500


class Leaner(Net):
    """Keeps a third when it runs for real."""

    def extra(self, inputs: Tensor) -> int:
        return 3000 if is_tracing() else 1000


class Reading(Net):
    """Keeps more where a value is positive: it always is, and a trace answers False first."""

    def extra(self, inputs: Tensor) -> int:
        return 3000 if inputs.mean() > -1e9 else 1000


class Thrifty(Net):
    """Would keep more where a value is large: it never is, and a plan has to allow for it."""

    def extra(self, inputs: Tensor) -> int:
        return 3000 if inputs.mean() > 1e9 else 1000


class Leaving(Leaner):
    """Cannot be traced: its forward leaves torch."""

    def extra(self, inputs: Tensor) -> int:
        inputs.detach().numpy()
        return 1000


class Evaluating(Net):
    """Keeps more in evaluation."""

    def extra(self, inputs: Tensor) -> int:
        return 1000 if self.training else 9000


class Careful(Net):
    """Reads a value on which no memory depends."""

    def extra(self, inputs: Tensor) -> int:
        float(inputs.mean())
        return 1000


class Stacked:
    """Images as tensors, which a batch stacks: memory can run out in the very first fetch, before a shape is known."""

    task = "classification"

    def __init__(self, split: str):
        self.split = split
        self.spec = {"image_shape": (1, 8, 8), "num_classes": 10}

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(1, 8, 8), index % 10


class Views(Stacked):
    """The same as rows of one tensor of 128 KiB."""

    def __init__(self, split: str):
        super().__init__(split)
        self.images = torch.ones(len(self), 1, 8, 8)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 10
