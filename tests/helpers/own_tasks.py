"""Tasks and models as users write them, for what starts and what is refused."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainapp.losses.losses import classification, next_token


class Net(nn.Module):
    """Two blocks and a head; the task reads `features` and `log_vars`, which `forward` does not."""

    def __init__(self, num_classes: int, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(n, width), nn.Tanh()) for n in (64, width))
        self.head = nn.Linear(width, num_classes)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def features(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))


CALLS = [0]
LOGITS: list[Tensor] = []


def with_globals(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int, dict[str, Any]]:
    """A loss that depends on how often the task was called, and on what it returned."""
    CALLS[0] += 1
    logits = model(batch["inputs"]) / CALLS[0] + sum(LOGITS)
    LOGITS.append(logits.detach())
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


class Pairs(Net):
    """Multiplies the features with themselves."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.pairs = nn.Bilinear(16, 16, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.features(inputs).float()  # torch's bilinear takes nothing else under autocast
        return self.pairs(features, features)


class Frozen(Net):
    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.requires_grad_(False)


class Lazy(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(8))
        self.head = nn.LazyLinear(num_classes)

    def blocks(self) -> list[nn.Module]:
        return [self.body]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


class LazyButUnused(Lazy):
    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.spare = nn.LazyLinear(3)


class Sparse(nn.Module):
    """An embedding of the 17 grey values, with sparse gradients."""

    def __init__(self, num_classes: int, through: str = "module", sparse: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(17, 4, sparse=sparse)
        self.head = nn.Linear(4 * 64, num_classes)
        self.through = through

    def forward(self, inputs: Tensor) -> Tensor:
        values = (inputs.flatten(1) * 3).long().clamp(0, 16)
        if self.through == "module":
            return self.head(self.embedding(values).flatten(1))
        return self.head(F.embedding(values, self.embedding.weight, sparse=True).flatten(1))


class Unregistered(nn.Module):
    """The classic mistake: a plain list of layers."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = [nn.Linear(64, 8)]
        self.head = nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers[0](inputs.flatten(1)))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")


def reads_attributes(model, batch):
    """Two losses weighed by parameters of the model that its forward does not use (Kendall et al. 2018)."""
    features = model.features(batch["inputs"])
    first = F.cross_entropy(model.head(features), batch["targets"], reduction="sum")
    second = features.square().sum()
    weights = torch.exp(-model.log_vars)
    count = len(batch["targets"])
    return weights[0] * first + weights[1] * second + count * model.log_vars.sum(), count, {}


def calls_twice(model, batch):
    noisy = model(batch["inputs"] * 0.9)
    logits = model(batch["inputs"])
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum") + (noisy - logits).square().sum()
    # The forward does not use `log_vars`: without this DDP would wait for its gradient.
    return loss + 0 * model.log_vars.sum(), len(logits), {}


def reads_a_blocks_weight(model, batch):
    penalty = 1e-3 * sum(p.square().sum() for p in model.parameters())
    return cross_entropy(model, batch) + penalty * len(batch["targets"]), len(batch["targets"]), {}


def plain_metrics(model, batch):
    loss, count = cross_entropy(model, batch), len(batch["targets"])
    return loss, count, {
        "a_float": 0.1 * count,
        "an_int": count,
        "a_bool": torch.ones((), dtype=torch.bool),
        "a_numpy_number": np.float32(0.5 * count),
        "an_array": np.array(0.25 * count),
        "called": lambda: 2.0 * count,
    }  # fmt: skip


def several_metrics(model, batch):
    logits = model(batch["inputs"])
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss, len(logits), {"right": logits.argmax(-1) == batch["targets"]}


def text_metric(model, batch):
    return cross_entropy(model, batch), len(batch["targets"]), {"name": "good"}


def no_metrics(model, batch):
    return cross_entropy(model, batch), len(batch["targets"]), None


def detached(model, batch):
    return cross_entropy(model, batch).detach(), len(batch["targets"]), {}


def vector(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none"), len(batch["targets"]), {}


def number(model, batch):
    return cross_entropy(model, batch).item(), len(batch["targets"]), {}


def only_a_loss(model, batch):
    return cross_entropy(model, batch)


def a_pair(model, batch):
    return cross_entropy(model, batch), len(batch["targets"])


class WithParameters(nn.Module):
    """A loss that is a module with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, model, batch):
        return (cross_entropy(model, batch) * self.scale).sum(), len(batch["targets"]), {}


with_parameters = WithParameters()
with_frozen_parameters = WithParameters().requires_grad_(False)
_CENTRES = nn.Embedding(10, 10)


def uses_a_global_module(model, batch):
    logits = model(batch["inputs"])
    loss = (logits - _CENTRES(batch["targets"])).square().sum()
    return loss, len(logits), {}


def nan_in_evaluation(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Classification; in evaluation the metric divides zero by zero."""
    loss, count, _ = classification(model, batch)
    return loss, count, {"ratio": torch.tensor(1.0 if model.training else float("nan"))}


class InfOnce:
    """Classification; the metric is infinite in the first evaluation, and 0.5 later."""

    def __init__(self) -> None:
        self.has_evaluated = False

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Trial calls are undone: it has a state."""
        loss, count, _ = classification(model, batch)
        if not self.has_evaluated and not model.training:
            self.has_evaluated = True
            return loss, count, {"ratio": torch.tensor(float("inf"))}
        return loss, count, {"ratio": torch.tensor(0.5 * count)}

    def state_dict(self) -> dict[str, bool]:
        """Whether it has."""
        return {"has_evaluated": self.has_evaluated}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """As saved."""
        self.has_evaluated = state["has_evaluated"]


def leaves_torch(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Tensors without data cannot do that."""
    batch["inputs"].numpy()
    return classification(model, batch)


KEPT: dict[str, Tensor] = {}


def keeps_weights(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Makes its weights at first use."""
    if not KEPT:
        KEPT["weights"] = torch.full((10,), 0.5)
    loss = F.cross_entropy(model(batch["inputs"]), batch["targets"], weight=KEPT["weights"], reduction="sum")
    return loss, len(batch["targets"]), {}


class Bank:
    """next_token with 400 KB in a list beside the model."""

    def __init__(self):
        self.bank = [torch.zeros(100_000)]

    def __call__(self, model, batch):
        return next_token(model, batch)


def dropout_and_data(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Classification that draws a random number and counts its calls in an attribute, which scales the loss."""
    loss, count, _ = classification(model, batch)
    calls = model.calls = getattr(model, "calls", 0) + 1
    logits = model(batch["inputs"]).detach()
    return loss * (calls + torch.rand(())), count, {"accuracy": (logits.argmax(-1) == batch["targets"]).sum()}


class CountsInPlace:
    """Counts its calls in a tensor and in an array, which scale the loss."""

    def __init__(self) -> None:
        self.calls, self.by_half = torch.ones(()), np.zeros(2)

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, count, metrics = classification(model, batch)
        loss = loss + 0 * model.log_vars.sum()
        self.calls += 1
        self.by_half[int(self.calls) % 2] += 1
        return loss * (float(self.calls) + float(self.by_half[0])), count, {"accuracy": metrics["accuracy"]}
