"""Losses whose counts are sums of weights, and metrics that only some batches have. Plain PyTorch, as a user's file."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SILENT = -1  # the target of a sample with weight 0

# A run of them.
OVERRIDES = (
    "model=mlp",
    "~model.depth",
    "~model.dropout",
    "model.width=8",
    "model._target_=weighted.Network",
    "data=digits",
    "~data.augment",
    "data._target_=weighted.Vectors",
    "user_packages=[weighted]",
)


class Vectors:
    """Sample i is a vector, a class, and a weight of about `scale`; those in `silent` weigh nothing."""

    in_memory = True

    def __init__(self, split: str, scale: float = 1.0, silent: list[int] | None = None, size: int = 64):
        generator = torch.Generator().manual_seed(len(split))
        self.inputs = torch.randn(size, 6, generator=generator)
        self.targets = torch.randint(0, 4, (size,), generator=generator)
        self.weights = scale * (0.1 + torch.rand(size, generator=generator))
        if split == "train" and silent:
            self.targets[silent], self.weights[silent] = SILENT, 0.0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices)
        return {name: getattr(self, name)[rows] for name in ("inputs", "targets", "weights")}


class Network(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width, momentum=0.5), nn.Linear(width, 4))
        self.layers[1].eval()

    def train(self, mode: bool = True) -> "Network":
        """Normalises with its running statistics, so that no cut changes the result."""
        super().train(mode)
        self.layers[1].eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def task(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weighted cross-entropy, divided by the sum of the weights. Only batches with class 3 have the metric `third`."""
    targets, weights = batch["targets"], batch["weights"]
    logits = model(batch["inputs"])
    losses = F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    right = (logits.argmax(-1) == targets).float()
    metrics = {"accuracy": (right * weights).sum()}
    if (targets == 3).any():
        metrics["third"] = ((targets == 3) * weights).sum()
    return (losses * weights).sum(), weights.sum(), metrics


def as_numbers(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float, dict[str, Tensor]]:
    """The same with the count as a Python number."""
    loss, count, metrics = task(model, batch)
    return loss, float(count), metrics


def on_one_rank(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The first rank has one metric, the others have two of other names."""
    loss, count, metrics = task(model, batch)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    others = {f"one_{rank}": count.clone(), f"two_{rank}": 2 * count}
    return loss, count, {"accuracy": metrics["accuracy"]} if rank == 0 else others
