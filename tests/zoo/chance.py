"""Models with randomness and Python state of their own."""

import collections
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def layers(outputs=4):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


class OwnGenerators(nn.Module):
    """Noise from generators of its own, one of them in a dict of settings."""

    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.generator, self.rng = torch.Generator().manual_seed(7), np.random.default_rng(3)
        self.noise = {"level": 0.2, "rng": random.Random(5)}

    def forward(self, inputs):
        if self.training:
            inputs = inputs * (torch.rand(inputs.shape, generator=self.generator) > 0.2)
            inputs = inputs + float(self.rng.random()) + self.noise["level"] * self.noise["rng"].gauss(0, 1)
        return self.layers(inputs)


class Mixup(nn.Module):
    """NumPy's global generator decides the shares of an inputs' neighbour, and Python's whether there is one."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, inputs):
        if self.training and random.random() < 0.8:
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


class Counter(nn.Module):
    """A number in a plain attribute, which training depends on."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = layers(), 0

    def forward(self, inputs):
        if self.training:
            self.calls += 1
        return self.layers(inputs) * (1 + 0.1 * self.calls)


class Queue(nn.Module):
    """A deque of earlier features and a temperature that falls with every forward, declared as extra state."""

    def __init__(self):
        super().__init__()
        self.features, self.head = layers(8), nn.Linear(8, 4)
        self.queue, self.calls = collections.deque(maxlen=5), 0

    def get_extra_state(self):
        queue = torch.stack(list(self.queue)) if self.queue else torch.zeros(0, 8)
        return {"queue": queue, "calls": self.calls}

    def set_extra_state(self, state):
        self.queue, self.calls = collections.deque(state["queue"].unbind(), maxlen=5), state["calls"]

    def forward(self, inputs):
        features = self.features(inputs)
        if self.queue:
            features = features - 0.1 * torch.stack(list(self.queue)).mean(0)
        if self.training:
            self.calls += 1
            self.queue.append(features.detach().mean(0).clone())
        return self.head(features) / (1 + 0.9**self.calls)
