"""Models whose memory in a run is not that of their trace, which runs on fake tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from trainapp.tasks import classification


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


class Bank(Net):
    """Keeps 1000 numbers more after each training step."""

    def __init__(self):
        super().__init__()
        self.bank: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.bank.append(torch.zeros(1000))
        return super().forward(inputs)


class Remembering(Net):
    """Keeps what it has computed, with its graph, until it computes it again."""

    features = None

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        flat.new_ones(len(flat), 8000)  # for a moment, beside what is still kept: the peak
        self.features = flat.new_ones(len(flat), 1000) * self.scale
        return self.last(flat) + (self.features * self.features).mean(1, keepdim=True)


class Taught:
    """A classification with a teacher of 26,000 bytes."""

    def __init__(self):
        self.teacher = nn.Linear(64, 100)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        loss, *rest = classification(model, batch)
        with torch.no_grad():
            wanted = self.teacher(batch["inputs"].flatten(1)).mean()
        return (loss + 0 * wanted, *rest)


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


class Meaned(nn.Module):
    """Takes rows of any number."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).mean(1)


class Padded(Stacked):
    """Rows of 16, of which one may have 64; batches are padded to the longest of their own."""

    def __init__(self, split: str, size: int = 320, long: int = -1):
        self.size, self.long = size, long

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(64 if index == self.long else 16, 8), index % 10

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        rows = nn.utils.rnn.pad_sequence([rows for rows, _ in samples], batch_first=True)
        return {"inputs": rows, "targets": torch.tensor([target for _, target in samples])}


class Normed(nn.Module):
    """Cannot train on a single sample."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(64, 2), nn.Sequential(nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(self.first(inputs.flatten(1)).repeat(1, 256)).repeat(1, 5)


class Refusing(Net):
    """Says so itself."""

    def extra(self, inputs: Tensor) -> int:
        if self.training and len(inputs) < 2:
            raise ValueError("pairs are needed")
        return 1000
