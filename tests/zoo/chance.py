"""Models with randomness and Python state of their own."""

import collections
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def layers(outputs=4):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


class OwnGenerator(nn.Module):
    """Dropout masks from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, inputs):
        if self.training:
            inputs = inputs * (torch.rand(inputs.shape, generator=self.generator) > 0.2)
        return self.layers(inputs)


class DropPath(nn.Module):
    """Whole branches are dropped as a NumPy generator decides."""

    def __init__(self, depth=3):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 4)
        self.rng = np.random.default_rng(3)

    def forward(self, inputs):
        for branch in self.branches:
            kept = torch.from_numpy(self.rng.random(len(inputs)) > 0.3) if self.training else torch.ones(len(inputs))
            inputs = inputs + kept[:, None].float() * branch(inputs).relu()
        return self.head(inputs)


class StochasticDepth(nn.Module):
    """A module list of which the standard library's generator skips some."""

    def __init__(self, depth=4):
        super().__init__()
        self.blocks_ = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        for block in self.blocks_:
            if not self.training or random.random() > 0.3:
                inputs = inputs + block(inputs).relu()
        return self.head(inputs)


class OwnRandom(nn.Module):
    """The generator sits in a dict of settings."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.noise = {"level": 0.2, "rng": random.Random(5)}

    def forward(self, inputs):
        if self.training:
            inputs = inputs + self.noise["level"] * self.noise["rng"].gauss(0, 1)
        return self.layers(inputs)


class Mixup(nn.Module):
    """Inputs are mixed with their neighbours, in shares of NumPy's global generator."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, inputs):
        if self.training:
            share = float(np.random.beta(0.4, 0.4))
            inputs = share * inputs + (1 - share) * inputs.flip(0)
        return self.layers(inputs)


class Gumbel(nn.Module):
    """Discrete latents, drawn by torch's global generator."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = layers(8), layers(8)

    def forward(self, inputs):
        latent = F.gumbel_softmax(self.encode(inputs), tau=0.7, hard=True)
        return (self.decode(latent) - inputs).square().mean(1)


class Annealed(nn.Module):
    """A temperature that falls with every training forward: a Python number, declared as extra state."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, inputs):
        self.calls += self.training
        return self.layers(inputs) / (1 + 0.9**self.calls)


class Queue(nn.Module):
    """A deque of earlier features, declared as extra state."""

    def __init__(self):
        super().__init__()
        self.features, self.head = layers(8), nn.Linear(8, 4)
        self.queue = collections.deque(maxlen=5)

    def get_extra_state(self):
        return {"queue": torch.stack(list(self.queue)) if self.queue else torch.zeros(0, 8)}

    def set_extra_state(self, state):
        self.queue = collections.deque(state["queue"].unbind(), maxlen=5)

    def forward(self, inputs):
        features = self.features(inputs)
        if self.queue:
            features = features - 0.1 * torch.stack(list(self.queue)).mean(0)
        if self.training:
            self.queue.append(features.detach().mean(0).clone())
        return self.head(features)
