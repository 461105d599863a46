"""Losses, metrics and data sets that remember something from batch to batch.

The objects at the end are what `task` names; a process has one of each.
"""

import collections

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .data import Vectors


class RunningScale:
    """Divides the loss by its own running mean."""

    def __init__(self):
        self.mean = torch.ones(())

    def state_dict(self):
        return {"mean": self.mean.clone()}

    def load_state_dict(self, state):
        self.mean = state["mean"].clone()

    def __call__(self, model, batch):
        losses = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
        if model.training:
            self.mean = 0.9 * self.mean + 0.1 * losses.detach().mean()
        return losses.sum() / self.mean, len(losses), {}


class Centre(nn.Module):
    """DINO's centre: a module that is a loss, with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, model, batch):
        logits = model(batch["inputs"])
        loss = F.cross_entropy(logits - self.centre, batch["targets"], reduction="sum")
        if model.training:
            self.centre.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
        return loss, len(logits), {}


class RandomSmoothing:
    """Label smoothing of a random strength, from a NumPy generator of its own; no state dict."""

    def __init__(self):
        self.rng = np.random.default_rng(11)

    def __call__(self, model, batch):
        strength = float(self.rng.uniform(0, 0.2)) if model.training else 0.0
        logits = model(batch["inputs"])
        loss = F.cross_entropy(logits, batch["targets"], reduction="sum", label_smoothing=strength)
        return loss, len(logits), {}


class NoisyVectors(Vectors):
    """Noise from a torch generator of its own: another draw each time a sample is fetched."""

    def __init__(self, split, seed=0, size=40, val_size=12):
        super().__init__(split, seed, size, val_size)
        self.split, self.generator = split, torch.Generator().manual_seed(seed + 5)

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if self.split == "train":
            sample["inputs"] = sample["inputs"] + 0.3 * torch.randn(8, generator=self.generator)
        return sample


class Replay(NoisyVectors):
    """Mixes each sample with one fetched before: a queue, declared by a state dict."""

    def __init__(self, split, seed=0, size=40, val_size=12):
        super().__init__(split, seed, size, val_size)
        self.generator, self.recent = None, collections.deque([0], maxlen=7)

    def state_dict(self):
        return {"recent": list(self.recent)}

    def load_state_dict(self, state):
        self.recent = collections.deque(state["recent"], maxlen=7)

    def __getitem__(self, index):
        sample = Vectors.__getitem__(self, index)
        if self.split == "train":
            sample["inputs"] = 0.8 * sample["inputs"] + 0.2 * self.inputs[self.recent[0]]
            self.recent.append(index)
        return sample


class Deviation:
    """A metric: the standard deviation of the true class's logit over all samples. It keeps them, in a list."""

    def __init__(self):
        self.found = []

    def reset(self):
        self.found = []

    def update(self, logits, targets):
        self.found.append(logits.gather(1, targets[:, None]).flatten())

    def merge(self, other):
        self.found += other.found

    def compute(self):
        return torch.cat(self.found).double().std()


class Stream:
    """Vectors in turn, from another one in each epoch, with noise from the global generator; no indices, no length."""

    in_memory = True

    def __init__(self, split, seed=0, size=40, val_size=12):
        self.vectors, self.epoch = Vectors(split, seed, size, val_size), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return map(self.sample, range(len(self.vectors)))

    def sample(self, number):
        sample = self.vectors[(number + 3 * self.epoch) % len(self.vectors)]
        return {**sample, "inputs": sample["inputs"] + 0.3 * torch.randn(8)}


class StreamWithState(Stream):
    """Says where it is."""

    start = position = 0

    def __iter__(self):
        self.position, self.start = self.start, 0
        while self.position < len(self.vectors):
            self.position += 1
            yield self.sample(self.position - 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


running_scale = RunningScale()
centre = Centre()
random_smoothing = RandomSmoothing()
