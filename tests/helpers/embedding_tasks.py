"""Losses of embeddings, right and wrong ones, and a model with all that a forward may draw and write."""

import torch
from torch import nn
from torch.nn import functional as F

from trainapp.tasks import Contrastive, EmbeddingTask


class Encoder(nn.Module):
    """Dropout, BatchNorm, a generator of its own, and a temperature that is trained."""

    def __init__(self, num_classes: int, width: int = 16, dropout: float = 0.3, norm: bool = True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 8)
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


class Teaching(Encoder):
    """A momentum teacher in parameters, which every forward writes."""

    def __init__(self, num_classes: int, width: int = 16, dropout: float = 0.0):
        super().__init__(num_classes, width, dropout, norm=False)
        self.teacher = nn.Linear(width, 8).requires_grad_(False)

    def forward(self, inputs):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
        return super().forward(inputs)


def infonce(first, second):
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


def per_micro_batch(model, batch):
    """The wrong variant: each sample against those of its micro-batch."""
    return mirrored(model, batch)


def cross_entropy(model, batch):
    """A sum over samples."""
    losses = F.cross_entropy(model(batch["inputs"]), batch["targets"] % 8, reduction="none")
    return losses.sum(), len(losses), {}


class Drawing(Mirrored):
    """The loss draws random numbers, and counts."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)
        self.seen = 0

    def loss_of_embeddings(self, embeddings):
        self.seen += 1
        first = embeddings["first"] + 0.1 * torch.randn(embeddings["first"].shape)
        return infonce(first + 0.1 * torch.rand((), generator=self.generator), embeddings["second"])

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Failing(Mirrored):
    """Runs out of memory once: in the n-th call of `embed`, or in the loss."""

    calls, at, in_loss = 0, None, False

    def embed(self, model, batch):
        if model.training:
            type(self).calls += 1
        self.strike(self.at is not None and self.calls == self.at)
        return super().embed(model, batch)

    def loss_of_embeddings(self, embeddings):
        if torch.is_grad_enabled():
            self.strike(self.in_loss)
        return super().loss_of_embeddings(embeddings)

    def strike(self, now):
        if now:
            type(self).at, type(self).in_loss = None, False
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")


class Direct(Mirrored):
    """The loss depends on a parameter directly."""

    def embed(self, model, batch):
        self.scale = model.scale
        return super().embed(model, batch)

    def loss_of_embeddings(self, embeddings):
        loss, count, _ = super().loss_of_embeddings(embeddings)
        return loss * self.scale.exp().sum(), count, {}


class Mean(Mirrored):
    def embed(self, model, batch):
        return super().embed(model, batch)["first"].mean()


class Views(Mirrored):
    """Two rows per sample."""

    def embed(self, model, batch):
        found = super().embed(model, batch)
        return torch.cat([found["first"], found["second"]])


class Nothing(Mirrored):
    def embed(self, model, batch):
        return {}


class Wide(Mirrored):
    """Rows as wide as the micro-batch is large."""

    def embed(self, model, batch):
        first = super().embed(model, batch)["first"]
        return first @ first.T


class Detached(Mirrored):
    def loss_of_embeddings(self, embeddings):
        loss, count, metrics = super().loss_of_embeddings(embeddings)
        return loss.detach(), count, metrics


class Half:
    """Without a loss of embeddings."""

    whole_batch = True

    def embed(self, model, batch):
        return model(batch["inputs"])

    def __call__(self, model, batch):
        return self.embed(model, batch).sum(), 1, {}


class Unsaid(Mirrored):
    whole_batch = False


cold = Contrastive(temperature=0.05)
