"""A replay buffer without a state dict, held by a model or by a task, and a global variable that a loss writes."""

import random
from collections import deque

import own_counters
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

CALLS = 0


class Replay:
    """A buffer of samples, as of an image pool: a list, a ring, counts by class, a tensor written in place."""

    def __init__(self):
        self.samples, self.recent, self.by_class = [], deque(maxlen=20), {}
        self.total = torch.zeros(64)
        self.pushed = 0

    def push(self, inputs, targets):
        self.pushed += len(inputs)
        self.total += inputs.detach().flatten(1).sum(0)
        for row, target in zip(inputs.flatten(1).detach(), targets.tolist(), strict=True):
            self.samples.append(row)
            self.recent.append(target)
            self.by_class.setdefault(target, []).append(float(row.sum()))

    def facts(self):
        return len(self.samples), list(self.recent), self.by_class, self.total.tolist(), self.pushed


class Held(nn.Module):
    """A model that holds one, and learns from what is in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.replay = Replay()

    def forward(self, inputs):
        return self.linear(inputs.flatten(1))


class InList(Held):
    """It is in a list, and is replaced when it is full."""

    def __init__(self):
        super().__init__()
        self.pools, self.replay = [self.replay], None


def replays(model, batch):
    """A loss that also depends on the buffer."""
    replay = model.replay or model.pools[-1]
    replay.push(batch["inputs"], batch["targets"])
    if model.replay is None and replay.pushed >= 40:
        model.pools.append(Replay())
    inputs = torch.stack([batch["inputs"][0].flatten(), replay.samples[random.randrange(len(replay.samples))]])
    loss = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")
    return loss + model(inputs).square().sum(), len(batch["targets"]), {}


def counts(model, batch):
    """A loss with global variables, in its module and in another one."""
    global CALLS
    CALLS += 1
    own_counters.CALLS += 1
    loss = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")
    return loss, len(batch["targets"]), {}


class WithOtherRows:
    """A loss that takes further rows from an endless generator over a data loader, as for images without labels."""

    def __init__(self):
        self.rows = self.endless(DataLoader(torch.arange(40.0), batch_size=4))

    @staticmethod
    def endless(loader):
        while True:
            yield from loader

    def __call__(self, model, batch):
        inputs = batch["inputs"] + 0 * next(self.rows).sum()
        loss = F.cross_entropy(model(inputs), batch["targets"], reduction="sum")
        return loss, len(batch["targets"]), {}


class ByTask:
    """A loss that holds the buffer itself."""

    def __init__(self):
        self.replay = Replay()

    def __call__(self, model, batch):
        self.replay.push(batch["inputs"], batch["targets"])
        loss = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")
        return loss, len(batch["targets"]), {}
