"""Models and tasks as users write them, for what starts and what is refused, on one rank and on several."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainapp.losses.losses import classification
from trainapp.tasks import EmbeddingTask


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


class Synchronised(nn.Module):
    """Waits for the other ranks in its forward."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes), nn.SyncBatchNorm(num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Lazy(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(8))
        self.head = nn.LazyLinear(num_classes)

    def blocks(self) -> list[nn.Module]:
        return [self.body]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


class Sparse(nn.Module):
    """An embedding of the 17 grey values, with sparse gradients."""

    def __init__(self, num_classes: int, sparse: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(17, 4, sparse=sparse)
        self.head = nn.Linear(4 * 64, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embedding((inputs.flatten(1) * 3).long().clamp(0, 16)).flatten(1))


# Sums over samples up to a little, and sums whose gradients are none


def adaptive(model, batch):
    """As a solver whose error norm is taken over the batch."""
    logits = model(batch["inputs"])
    logits = logits + 1e-8 * logits.detach().norm() * logits.sin()
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


def triple_gradient(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3)


def mask_gradient(parameter: nn.Parameter) -> None:
    parameter.grad[0] = 0


class NetWithHooks(Net):
    """Hooks on the gradient of the head's weight, as users register them."""

    def __init__(self, num_classes: int, hook: str):
        super().__init__(num_classes)
        weight = self.head.weight
        match hook:
            case "clamps":
                weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
            case "normalises":
                weight.register_hook(lambda gradient: gradient / gradient.norm())
            case "scales":
                weight.register_hook(lambda gradient: gradient * 0.1)
            case "multiplies the sum":
                weight.register_post_accumulate_grad_hook(triple_gradient)
            case "masks the sum":
                weight.register_post_accumulate_grad_hook(mask_gradient)
            case _:
                raise ValueError(hook)


class NormalisedGradient(torch.autograd.Function):
    """The identity; the gradient is divided by its norm over the batch."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def normalises_gradients(model, batch):
    logits = NormalisedGradient.apply(model(batch["inputs"]))
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


# Sums over samples


def asserting(model, batch):
    """As the queue of MoCo: three samples do not divide its length."""
    assert 16 % len(batch["targets"]) == 0
    return cross_entropy(model, batch), len(batch["targets"]), {}


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")


def total(model, batch):
    return cross_entropy(model, batch), len(batch["targets"]), {}


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


class CountsCalls:
    """A base: the number of calls is part of the checkpoint."""

    def __init__(self):
        self.calls = 0

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class WithParameters(nn.Module):
    """A loss that is a module with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, model, batch):
        return (cross_entropy(model, batch) * self.scale).sum(), len(batch["targets"]), {}


with_parameters = WithParameters()
with_frozen_parameters = WithParameters().requires_grad_(False)


def nan_in_evaluation(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Classification; in evaluation the metric divides zero by zero."""
    loss, count, _ = classification(model, batch)
    return loss, count, {"ratio": torch.tensor(float(count) if model.training else float("nan"))}


class InfOnce:
    """Classification; the metric is infinite in evaluations of the first three steps, and 0.5 later."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Trial calls are undone: it has a state."""
        loss, count, _ = classification(model, batch)
        self.steps += model.training
        ratio = 0.5 * count if model.training or self.steps > 3 else float("inf")
        return loss, count, {"ratio": torch.tensor(ratio)}

    def state_dict(self) -> dict[str, int]:
        """The number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As saved."""
        self.steps = state["steps"]


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


# What is no sum, or cannot be trained


def mean(model, batch):
    count = len(batch["targets"])
    return cross_entropy(model, batch) / count, count, {}


def detached(model, batch):
    return cross_entropy(model, batch).detach(), len(batch["targets"]), {}


# Losses that compare the samples of a batch


class Encoder(nn.Module):
    """Dropout, BatchNorm, a generator of its own, and a temperature that is trained."""

    def __init__(self, num_classes: int, width: int = 16, dropout: float = 0.3, norm: bool = True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_classes)
        self.scale = nn.Parameter(torch.ones(1))  # FSDP takes no scalars
        self.generator = torch.Generator().manual_seed(1)
        self.noise = 0.1 if dropout else 0.0

    def blocks(self):
        return [self.body]

    def forward(self, inputs):
        hidden = self.dropout(self.body(inputs.flatten(1)))
        if self.training and self.noise:
            hidden = hidden + self.noise * torch.rand((), generator=self.generator)
        return self.head(hidden)


def infonce(first, second):
    """Each row against all rows of the other (Chen et al. 2020)."""
    logits = first @ second.T
    own = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits, own, reduction="sum"), len(logits), {"own": logits.diagonal().detach().sum()}


class Mirrored(EmbeddingTask):
    """Each image against all mirror images."""

    def embed(self, model, batch):
        first, second = (F.normalize(model(x), dim=1) for x in (batch["inputs"], batch["inputs"].flip(3)))
        return {"first": first * model.scale.exp(), "second": second, "targets": batch["targets"]}

    def loss_of_embeddings(self, embeddings):
        return infonce(embeddings["first"], embeddings["second"])


mirrored = Mirrored()


class MixesSamples(Mirrored):
    """The wrong variant: its rows are normalised over their micro-batch."""

    def embed(self, model, batch):
        first, second = (model(x) for x in (batch["inputs"], batch["inputs"].flip(3)))
        return {"first": first - first.mean(0), "second": second}


def per_micro_batch(model, batch):
    """The wrong variant: each sample against those of its micro-batch."""
    return mirrored(model, batch)


class Whole:
    """The same, which says so. sizes: of the batches that it was given in training."""

    whole_batch = True

    def __init__(self):
        self.sizes = []

    def __call__(self, model, batch):
        if model.training:
            self.sizes.append(len(batch["targets"]))
        return mirrored(model, batch)


class Shuffled(Whole):
    """It pairs its samples at random."""

    def __call__(self, model, batch):
        order = torch.randperm(len(batch["targets"]))
        return super().__call__(model, {name: values[order] for name, values in batch.items()})


class Mixture(nn.Module):
    """Each row of an image goes to one of four experts. Returns logits, features [B, 32], and the gate's probabilities
    and logits [B * 8, 4].
    """

    def __init__(self, num_classes: int):
        super().__init__()
        self.gate, self.head = nn.Linear(8, 4), nn.Linear(32, num_classes)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh()) for _ in range(4))

    def blocks(self) -> list[nn.Module]:
        return list(self.experts)

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        rows = inputs.reshape(-1, 8)
        scores = self.gate(rows)
        shares = scores.softmax(1)
        best, chosen = shares.max(1)
        each = torch.stack([expert(rows) for expert in self.experts], 1)
        features = (best[:, None] * each[torch.arange(len(rows)), chosen]).reshape(len(inputs), 8, -1).sum(1)
        return self.head(features), features, shares, scores


class Uniform(Mixture):
    """Its gate is uniform at first."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)


def balance(logits: Tensor, features: Tensor, shares: Tensor, scores: Tensor) -> Tensor:
    """Fedus et al. 2022, equation 4."""
    parts = F.one_hot(shares.argmax(1), 4).to(shares.dtype).mean(0)
    return 4 * (parts * shares.mean(0)).sum()


def importance(logits: Tensor, features: Tensor, shares: Tensor, scores: Tensor) -> Tensor:
    """Shazeer et al. 2017, equation 7."""
    return shares.sum(0).var(unbiased=False) / shares.sum(0).mean() ** 2


def balanced(model, batch):
    """With the coefficient of the paper."""
    logits, *others = model(batch["inputs"])
    losses = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return losses + 0.1 * len(logits) * importance(logits, *others), len(logits), {}


def in_double(num_classes: int) -> nn.Module:
    return Net(num_classes).double()


def cross_entropy_in_double(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    logits = model(batch["inputs"].double()) * model.log_vars.exp().sum()
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


class OwnTrain(Net):
    """With a method that has torch's name for another thing."""

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        raise NotImplementedError


class InAList(nn.Module):
    """Its layers are in a plain list, where torch does not find them."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = [nn.Linear(64, num_classes)]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers[0](inputs.flatten(1))


def of_sequences(model: nn.Module, batch: Any, pair: str = "sum") -> Any:
    """The loss of tokens, with a metric of sequences: the share of right tokens in each. `pair`: what its second is."""
    logits = model(batch["inputs"])
    is_right = logits.argmax(-1) == batch["targets"]
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    share = is_right.double().mean(1).sum()
    number = {"sum": len(logits), "one": 1}.get(pair)
    metrics = {"accuracy": is_right.sum(), "share": share if number is None else (share, number)}
    return loss, is_right.numel(), metrics | {"called": lambda: (share, torch.tensor(float(len(logits))))}


def sums_of_sums(model: nn.Module, batch: Any) -> Any:
    """The loss of tokens, with a metric that is summed over the tokens of each sequence first."""
    loss, count, _ = of_sequences(model, batch)
    is_right = model(batch["inputs"]).argmax(-1) == batch["targets"]
    return loss, count, {"accuracy": is_right.sum(1).sum().float()}


# Gradients of the inputs


def gradient_penalty(model, batch):
    """Of the inputs' gradient, after which the model is called again."""
    inputs = batch["inputs"].clone().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=model.training)
    logits = model(batch["inputs"] * 0.5)
    loss = F.cross_entropy(logits + outputs, batch["targets"], reduction="sum")
    return loss + gradient.square().sum(), len(logits), {}


class Attacked:
    """In evaluations, the accuracy on inputs moved by the sign of the loss's gradient.

    Args:
        by_backward: whether the gradient is computed by `backward()`, otherwise by `autograd.grad`.
    """

    def __init__(self, by_backward: bool = False):
        self.by_backward = by_backward

    def __call__(self, model, batch):
        inputs, targets = batch["inputs"], batch["targets"]
        metrics = {}
        if not model.training:
            with torch.enable_grad():
                moved = inputs.clone().requires_grad_()
                loss = F.cross_entropy(model(moved), targets, reduction="sum")
                if self.by_backward:
                    loss.backward()
                    gradient = moved.grad
                else:
                    (gradient,) = torch.autograd.grad(loss, moved)
            attacked = model(inputs + 0.1 * gradient.sign())
            metrics["loss_under_attack"] = F.cross_entropy(attacked, targets, reduction="sum")
        logits = model(inputs)
        return F.cross_entropy(logits, targets, reduction="sum"), len(logits), metrics


class Linear(Net):
    """Without activations: the gradient of the inputs is a product of the weights."""

    def __init__(self, num_classes: int, width: int = 16, dropout: float = 0.0):
        super().__init__(num_classes, width)
        self.layers = nn.ModuleList(nn.Linear(n, width) for n in (64, width))


def penalty_first(model, batch):
    """The penalty's gradients reach the weights, but no output of a block, after those of the second call."""
    inputs = batch["inputs"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=model.training)
    logits = model(batch["inputs"])
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss + gradient.square().sum(), len(logits), {}


def penalty_last(model, batch):
    logits = model(batch["inputs"])
    inputs = batch["inputs"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=model.training)
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss + gradient.square().sum(), len(logits), {}


def calls_backward(model, batch):
    """In training."""
    inputs = batch["inputs"].clone().requires_grad_()
    model(inputs).sum().backward()
    logits = model(inputs)
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


class FailsAfterAClimb:
    """A loss of tokens with a mistake that shows where blocks are checkpointed, that is, in a second session."""

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        from trainapp.losses.losses import next_token

        loss = next_token(model, batch)
        is_checkpointed = any("forward" in vars(block) for block in model.blocks())
        if model.training and is_checkpointed and torch.is_grad_enabled():
            raise IndexError("a mistake of the user")
        return loss
