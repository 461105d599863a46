"""Tasks whose losses are sums, or are not, and what a task may keep that a check must not change."""

import io
import queue
import random
import threading

import numpy as np
import torch
from own_tasks import Net
from torch import nn
from torch.nn import functional as F

from trainapp.data.sets.digits import Digits


def cross_entropies(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")


def mean(model, batch):
    losses = cross_entropies(model, batch)
    return losses.mean(), len(losses), {}


def mean_of_one(model, batch):
    return cross_entropies(model, batch).mean(), 1, {}


def sum_of_one(model, batch):
    return cross_entropies(model, batch).sum(), 1, {}


def contrastive(model, batch):
    """InfoNCE between an image and its mirror image: each sample against all of its batch (Chen et al. 2020)."""
    first, second = (F.normalize(model.features(x), dim=1) for x in (batch["inputs"], batch["inputs"].flip(3)))
    logits = first @ second.T / 0.1
    loss = F.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="sum")
    return loss + 0 * sum(p.sum() for p in model.parameters()), len(logits), {}


def weak_contrastive(model, batch):
    """Mostly a sum."""
    losses, (rest, _, _) = cross_entropies(model, batch), contrastive(model, batch)
    return losses.sum() + 0.03 * rest, len(losses), {}


def contrastive_mean(model, batch):
    loss, count, _ = contrastive(model, batch)
    return loss / count, count, {}


class Whole:
    """The same, which says so."""

    whole_batch = True

    def __init__(self):
        self.sizes = []

    def __call__(self, model, batch):
        if model.training:
            self.sizes.append(len(batch["targets"]))
        return contrastive(model, batch)


whole = Whole()


def penalised(model, batch):
    """A penalty per micro-batch instead of per sample."""
    losses = cross_entropies(model, batch)
    return losses.sum() + 0.1 * sum(p.square().sum() for p in model.parameters()), len(losses), {}


def weighted(model, batch):
    """The count is a sum of tiny weights, other ones for other samples."""
    weights = 1e-6 * (1 + batch["targets"])
    return (weights * cross_entropies(model, batch)).sum(), weights.sum(), {}


def cancelling(model, batch):
    """A critic: summands of both signs, whose sum is close to zero."""
    logits = model(batch["inputs"])
    logits = logits - logits.detach().mean(1, keepdim=True)
    return logits.sum(), len(logits), {}


def nothing(model, batch):
    return 0 * cross_entropies(model, batch).sum(), 0 * batch["targets"].sum(), {}


def not_a_number(model, batch):
    losses = cross_entropies(model, batch)
    return losses.sum() * (1.0 if model.training else float("nan")), len(losses), {}


def noisy(model, batch):
    inputs = batch["inputs"] + torch.randn_like(batch["inputs"])
    return cross_entropies(model, {**batch, "inputs": inputs}).sum(), len(inputs), {}


def seeded_noise(model, batch):
    """The same noise in every call, which depends on the shape of the batch."""
    generator = torch.Generator().manual_seed(3)
    inputs = batch["inputs"] + torch.randn(batch["inputs"].shape, generator=generator)
    return cross_entropies(model, {**batch, "inputs": inputs}).sum(), len(inputs), {}


def noisy_by_numpy(model, batch):
    inputs = batch["inputs"] * (1 + np.random.rand() + random.random())
    return cross_entropies(model, {**batch, "inputs": inputs}).sum(), len(inputs), {}


def training_only(model, batch):
    if not model.training:
        raise RuntimeError("this loss has no evaluation")
    return cross_entropies(model, batch).sum(), len(batch["targets"]), {}


def hungry(model, batch):
    """Runs out of memory as long as it has more than one sample, in evaluation mode."""
    if not model.training and len(batch["targets"]) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return cross_entropies(model, batch).sum(), len(batch["targets"]), {}


HISTORY = []
CALLS = 0


def counting():
    calls = 0

    def task(model, batch):
        """Counts its calls in a closure and in global variables, and scales by them."""
        global CALLS
        nonlocal calls
        calls, CALLS = calls + 1, CALLS + 1
        HISTORY.append(len(batch["targets"]))
        return cross_entropies(model, batch).sum() / (calls + CALLS + len(HISTORY)), len(batch["targets"]), {}

    return task


class Keeping(Net):
    """A model that writes whatever it can in every forward, in evaluation too."""

    def __init__(self, num_classes: int, width: int = 16):
        super().__init__(num_classes, width, 0.0)
        self.norm = nn.BatchNorm1d(width)
        self.norm.train = lambda mode=True: self.norm  # its statistics follow evaluation, too
        self.teacher = nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("first", None)
        self.calls, self.cache, self.queue = 0, {}, [torch.zeros(3)]
        self.generator = torch.Generator().manual_seed(1)
        self.dropout = nn.Dropout(0.3)

    def features(self, inputs):
        x = self.dropout(self.norm(super().features(inputs)))
        with torch.no_grad():
            self.seen += len(inputs)
            self.teacher.weight.lerp_(self.layers[1][0].weight, 0.1)
            self.queue[0].add_(1)
            if self.first is None:
                self.first = x.detach().mean(0)
        self.calls += 1
        self.cache[len(inputs)] = x.detach()
        self.queue.append(x.detach())
        x = x + 1e-3 * (torch.rand(()) + torch.rand((), generator=self.generator))
        return x + self.teacher(x) + self.first + 1e-3 * self.calls + 1e-3 * len(self.queue) + 1e-3 * len(self.cache)


class Remembering(Digits):
    """Its samples depend on how many it has been asked for."""

    in_memory = False
    fetched = 0

    def __getitems__(self, indices):
        self.fetched += len(indices)
        batch = super().__getitems__(indices)
        return {**batch, "inputs": batch["inputs"] * (1 + 1e-3 * self.fetched)}


class Opened(Digits):
    """Reads its file at the first use, and closes it; samples come from a thread."""

    in_memory = False

    def __init__(self, split, augment: bool = False):
        super().__init__(split)
        self.file, self.content = io.StringIO("content"), None
        self.asked, self.given = queue.Queue(), queue.Queue()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            self.given.put(Digits.__getitems__(self, self.asked.get()))

    def __getitems__(self, indices):
        if self.content is None:
            self.content = self.file.read()
            self.file.close()
        self.asked.put(indices)
        return self.given.get(timeout=20)


def total(model, batch):
    losses = cross_entropies(model, batch)
    return losses.sum(), len(losses), {}


def cross_entropy(model, batch):
    losses = cross_entropies(model, batch)
    return losses.sum(), len(losses), {}


def no_loss(model, batch):
    return None
