"""Models whose allocation has a size chosen by the test, and one with unusual blocks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainapp.data.sets.digits import Digits
from trainapp.models.gpt import GPT


class Scratch(nn.Module):
    """A linear model that also fills a buffer in every forward; the buffer's size does not depend on the batch."""

    def __init__(self, num_classes: int, scratch: int = 1):
        super().__init__()
        self.linear, self.scratch = nn.Linear(64, num_classes), scratch

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.flatten(1)) + torch.zeros(self.scratch)[0]


class Normed(nn.Module):
    """Its block has BatchNorm beside a linear layer. counts: it also counts its forwards, in a buffer of its own."""

    def __init__(self, num_classes: int, counts: bool = False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, num_classes)
        if counts:
            self.register_buffer("seen", torch.zeros(1))
        self.counts = counts

    def blocks(self) -> list[nn.Module]:
        return [self.body]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.counts and self.training:
            self.seen += 1
        return self.head(self.body(inputs.flatten(1)))


class FrozenNorm(Normed):
    """Its BatchNorm stays in evaluation mode, and it counts its forwards."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes, counts=True)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.body[1].eval()
        return self


class NormedPoint(nn.Module):
    """BatchNorm of maps of one pixel, which cannot train on a single sample. Nothing says so before its forward.

    bad: the digit that it refuses, in any micro-batch.
    """

    def __init__(self, num_classes: int, width: int = 8, bad: int = -1):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, width, 8), nn.BatchNorm2d(width), nn.Linear(width, num_classes)
        self.bad = Digits("train")[bad]["inputs"].flatten() if bad >= 0 else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.bad is not None and (inputs.flatten(1) == self.bad).all(1).any():
            raise ValueError("this digit is refused")
        return self.head(self.norm(self.conv(inputs)).relu().flatten(1))


class Grouped(nn.Module):
    """Trains on multiples of 8 samples only, as a loss does that pairs or groups its batch."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            assert len(inputs) % 8 == 0, "Batch size should be a multiple of 8"
        return self.head(self.layer(inputs.flatten(1)).relu())


class GroupedAlways(Grouped):
    """The same in evaluation, with groups of any size."""

    def __init__(self, num_classes: int, group: int):
        super().__init__(num_classes)
        self.group = group

    def forward(self, inputs: Tensor) -> Tensor:
        assert len(inputs) % self.group == 0, f"Batch size should be a multiple of {self.group}"
        return self.head(self.layer(inputs.flatten(1)).relu())


class NormedPair(NormedPoint):
    """The same, which declares it."""

    smallest_micro_batch = 2


class Quads(nn.Module):
    """A linear model of the samples in groups of four."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.linear = nn.Linear(64, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            inputs = inputs.reshape(len(inputs) // 4, 4, 64)
        return self.linear(inputs).reshape(-1, self.linear.out_features)


class Wide(nn.Module):
    """Weights beside which everything else is small."""

    def __init__(self, num_classes: int, width: int = 256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs.flatten(1)))


class HeadInBlock(GPT):
    """Its head is one of the blocks."""

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), self.head]


class Gated(GPT):
    """Each block's MLP has gates, whose weight is a matrix of few rows, [rows, width]."""

    def __init__(self, vocab_size: int, context_length: int, width: int, rows: int = 1, **others):
        super().__init__(vocab_size, context_length, width=width, **others)
        for layer in self.layers:
            layer.mlp = GatedMLP(layer.mlp, width, rows)


class GatedMLP(nn.Module):
    """The outputs of an MLP times the mean of some gates."""

    def __init__(self, mlp: nn.Module, width: int, rows: int):
        super().__init__()
        self.mlp, self.gate = mlp, nn.Linear(width, rows, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.mlp(inputs) * self.gate(inputs).sigmoid().mean(-1, keepdim=True)


class TiedOnce(GPT):
    """Ties its embeddings when it is constructed, not again when its weights are initialised."""

    def init_weights(self) -> None:
        super().init_weights()
        self.tie_embeddings = False


class ScaledHead(GPT):
    """Its logits are scaled after the head, which a loss computed from features and head would not do."""

    def forward(self, inputs):
        return 0.1 * super().forward(inputs)


def training_digits(split: str, augment: bool = False) -> Digits | None:
    """Data without a validation split."""
    return Digits("train", augment=augment) if split == "train" else None


class HungryForward(nn.Module):
    """Needs 16,000 bytes per sample in the forward."""

    def forward(self, inputs):
        return inputs + torch.zeros(len(inputs), 4000).amax(1, keepdim=True)


class _HungryBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + torch.zeros(len(gradient), 4000)[:, :1] * 0


class HungryBackward(nn.Module):
    """Needs 16,000 bytes per sample in the backward."""

    def forward(self, inputs):
        return _HungryBackward.apply(inputs)


class Hungry(nn.Module):
    """Its block `blocks_.1` needs far more memory than the others in this phase."""

    def __init__(self, image_shape, num_classes: int, phase: str = "forward"):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, num_classes)
        self.blocks_ = nn.ModuleList([nn.Identity(), HungryForward() if phase == "forward" else HungryBackward()])

    def forward(self, inputs):
        features = self.first(inputs.flatten(1))
        for block in self.blocks_:
            features = block(features)
        return self.last(features)


def fails_in_evaluation(model: nn.Module, batch: dict[str, Tensor]) -> tuple:
    """A task with a mistake of its own."""
    logits = model(batch["inputs"])
    loss = nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss, len(logits) // int(model.training), {}


class LongAndShort:
    """Rows of ones; in evaluations the middle third is shorter."""

    def __init__(self, split: str):
        self.lengths = [64] * 15
        if split == "val":
            self.lengths[5:10] = [8] * 5
        self.spec = {"num_classes": 3}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict:
        return {"inputs": torch.ones(self.lengths[index], 1), "targets": torch.tensor(0)}


class RunsOutOnShort(nn.Module):
    """More than one short row do not fit in evaluations."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.head = nn.Linear(1, num_classes)

    def forward(self, inputs):
        samples, length, _ = inputs.shape
        if not self.training and length == 8 and samples > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return self.head(inputs.mean(1))


class Pair(nn.Module):
    """A linear model of two inputs."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.linear = nn.Linear(64, num_classes)

    def forward(self, inputs: Tensor, others: Tensor) -> Tensor:
        return self.linear((inputs + others).flatten(1))


def of_pairs(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    outputs = model(batch["inputs"], batch["inputs"])
    return functional.cross_entropy(outputs, batch["targets"], reduction="sum"), len(outputs), {}


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Penalises the derivative of the outputs."""
    inputs = batch["inputs"].clone().requires_grad_()
    outputs = model(inputs)
    (gradients,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=model.training)
    return outputs.square().sum() + gradients.square().sum(), len(outputs), {}


def of_floats(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Gives the model another dtype than its own in evaluation."""
    outputs = model(batch["inputs"] if model.training else batch["inputs"].double())
    return outputs.square().sum(), len(outputs), {}


def not_in_a_backward(vocab_size: int, **settings: Any) -> nn.Module:
    """A GPT whose blocks cannot be recomputed."""
    model = GPT(vocab_size, **settings)
    for block in model.blocks():
        block.mlp.register_forward_pre_hook(_refuse_in_a_backward)
    return model


def _refuse_in_a_backward(part: nn.Module, inputs: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError("this block keeps its own state: it cannot run twice")


_GENERATOR = torch.Generator()


def with_its_own_generator(vocab_size: int, **settings: Any) -> nn.Module:
    """A GPT whose blocks draw masks from a generator of this module."""
    _GENERATOR.manual_seed(0)
    model = GPT(vocab_size, **settings)
    for block in model.blocks():
        block.mlp.register_forward_hook(_masked)
    return model


def _masked(part: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * torch.bernoulli(torch.full_like(output, 0.5), generator=_GENERATOR)
