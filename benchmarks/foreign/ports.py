"""The ports of public programs: for each a function that builds its model, and a loss. See experiment/ for settings.

A model's class comes from the checkout, unchanged; what a script did around it is here, as docs/porting.md says.
"""

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from definitions import definitions
from originals import without_dropout
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Any]
Result = tuple[Tensor, int, dict[str, Tensor]]


def interrupt_if_asked(number: int) -> None:
    """Send this process the signal of a preemption, where sample `number` is the one at which the benchmark asks."""
    if os.environ.get("INTERRUPT_AT_SAMPLE") == str(number):
        os.kill(os.getpid(), signal.SIGTERM)


class InOrder:
    """The recorded samples, in the order in which the original trained on them."""

    in_memory = True  # read here, not in worker processes

    def __init__(self, path: str):
        self.samples = torch.load(path)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, row in enumerate(zip(*self.samples.values(), strict=True)):
            interrupt_if_asked(number)
            yield dict(zip(self.samples, row, strict=True))


def in_order(split: str, path: str) -> InOrder | None:
    """A stream for training, and nothing to evaluate."""
    return InOrder(path) if split == "train" else None


class OneSample:
    """A data set of a single sample, which is seen in every step."""

    in_memory = True

    def __init__(self, split: str, path: str):
        self.samples = torch.load(path) if split == "train" else {}
        self.times_read = 0

    def __len__(self) -> int:
        return 1 if self.samples else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.times_read += 1
        interrupt_if_asked(self.times_read)
        return {name: rows[index] for name, rows in self.samples.items()}


# mnist


def mnist(checkout: str) -> nn.Module:
    return without_dropout(definitions(Path(checkout) / "mnist/main.py").Net())


def log_likelihood(model: nn.Module, batch: Batch) -> Result:
    logarithms = model(batch["inputs"])
    return F.nll_loss(logarithms, batch["targets"], reduction="sum"), len(logarithms), {}


# vae


def vae(checkout: str) -> nn.Module:
    return definitions(Path(checkout) / "vae/main.py").VAE()


class SumOverTheBatch:
    """The script backpropagates the sum over its batch of 512; the mean that is trained here is multiplied by it. Its
    noise comes with the batch, so that two programs can be compared."""

    def __init__(self, global_size: int):
        self.global_size = global_size

    def __call__(self, model: Any, batch: Batch) -> Result:
        images = batch["inputs"].flatten(1)
        mean, log_variance = model.encode(images)
        decoded = model.decode(mean + batch["noise"] * torch.exp(0.5 * log_variance))
        reconstruction = F.binary_cross_entropy(decoded, images, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return self.global_size * (reconstruction + divergence), len(images), {}


# super_resolution


def super_resolution(checkout: str) -> nn.Module:
    return definitions(Path(checkout) / "super_resolution/model.py").Net(upscale_factor=2)


def squared_error(model: nn.Module, batch: Batch) -> Result:
    errors = F.mse_loss(model(batch["inputs"]), batch["targets"], reduction="none")
    return errors.flatten(1).mean(1).sum(), len(errors), {}


# gcn


def gcn(checkout: str, features: int, classes: int) -> nn.Module:
    return definitions(Path(checkout) / "gcn/main.py").GCN(features, 16, classes, use_bias=False, dropout_p=0.0)


def over_nodes(model: nn.Module, batch: Batch) -> Result:
    (features,), (edges,), (targets,), (mask,) = (batch[name] for name in ("features", "edges", "targets", "mask"))
    logarithms = model(features, edges.to_sparse())
    return F.nll_loss(logarithms[mask], targets[mask], reduction="sum"), len(mask), {}


# dcgan


def dcgan(checkout: str) -> nn.Module:
    program = definitions(Path(checkout) / "dcgan/main.py")
    vars(program).update(nz=16, ngf=8, ndf=8, nc=3)
    return nn.ModuleDict({"generator": program.Generator(1), "discriminator": program.Discriminator(1)}).double()


def discriminate(model: nn.ModuleDict, batch: Batch) -> Result:
    with torch.no_grad():
        fakes = model["generator"](batch["noise"])
    real, fake = model["discriminator"](batch["inputs"]), model["discriminator"](fakes)
    loss = F.binary_cross_entropy(real, torch.ones_like(real), reduction="sum")
    loss = loss + F.binary_cross_entropy(fake, torch.zeros_like(fake), reduction="sum")
    return loss, len(real), {}


def generate(model: nn.ModuleDict, batch: Batch) -> Result:
    verdicts = model["discriminator"](model["generator"](batch["noise"]))
    return F.binary_cross_entropy(verdicts, torch.ones_like(verdicts), reduction="sum"), len(verdicts), {}


# word_language_model


def word_language_model(checkout: str, columns: int) -> nn.Module:
    """The network keeps its state for the next chunk of each column."""
    model = definitions(Path(checkout) / "word_language_model/model.py").RNNModel("LSTM", 50, 32, 32, 2, dropout=0.0)
    model.per_sample_buffers = ["hidden", "cell"]
    for name in model.per_sample_buffers:
        model.register_buffer(name, torch.zeros(model.nlayers, columns, model.nhid), persistent=False)
    return model


def next_words(model: Any, batch: Batch) -> Result:
    column = batch["column"]
    state = (model.hidden[:, column], model.cell[:, column])
    logarithms, (hidden, cell) = model(batch["inputs"].t(), state)  # [T * B, vocabulary], time first
    model.hidden[:, column], model.cell[:, column] = hidden.detach(), cell.detach()
    targets = batch["targets"].t().flatten()
    return F.nll_loss(logarithms, targets, reduction="sum"), len(targets), {}


# time_sequence_prediction


def time_sequence_prediction(checkout: str) -> nn.Module:
    return definitions(Path(checkout) / "time_sequence_prediction/train.py").Sequence().double()


# nanogpt


def nanogpt(checkout: str) -> nn.Module:
    program = definitions(Path(checkout) / "model.py")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 65}
    return program.GPT(program.GPTConfig(**sizes, dropout=0.0, bias=False))


def next_tokens(model: nn.Module, batch: Batch) -> Result:
    _, mean = model(batch["inputs"], batch["targets"])
    return mean * batch["targets"].numel(), batch["targets"].numel(), {}


def cosine_with_warmup(step: int) -> float:
    """nanoGPT's get_lr, relative to its learning rate."""
    warmup, end, least = 5, 20, 0.1
    if step < warmup:
        return (step + 1) / (warmup + 1)
    ratio = min(1.0, (step - warmup) / (end - warmup))
    return least + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (1 - least)
