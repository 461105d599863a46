"""Models whose forward writes parameters: momentum teachers, codebooks, weights that are normalised in place."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def encoder():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def frozen_copy(module):
    teacher = copy.deepcopy(module)
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    return teacher


class MoCo(nn.Module):
    """The key encoder follows the query encoder at the start of every training forward; keys go into a queue."""

    def __init__(self, keys=32):
        super().__init__()
        self.query = encoder()
        self.key = frozen_copy(self.query)
        self.register_buffer("queue", F.normalize(torch.randn(keys, 8), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)

    @torch.no_grad()
    def enqueue(self, keys):
        places = (self.pointer + torch.arange(len(keys))) % len(self.queue)
        self.queue[places] = keys
        self.pointer.add_(len(keys)).remainder_(len(self.queue))

    def forward(self, inputs):
        queries = F.normalize(self.query(inputs + 0.1 * torch.randn_like(inputs)), dim=1)
        with torch.no_grad():
            if self.training:
                self.follow()
            keys = F.normalize(self.key(inputs), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().T], 1) / 0.2
        if self.training:
            self.enqueue(keys)
        return F.cross_entropy(logits, torch.zeros(len(inputs), dtype=torch.long), reduction="none")


class MeanTeacher(nn.Module):
    """The target network is a moving average, written through `.data`, as older code does."""

    def __init__(self):
        super().__init__()
        self.online, self.target = encoder(), encoder()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, inputs):
        predicted, wanted = self.online(inputs), self.target(inputs)
        if self.training:
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.data.mul_(0.9).add_(online.data, alpha=0.1)
        return (predicted - wanted + inputs).square().mean(1)


class HiddenTeacher(nn.Module):
    """The target network is in a list, so that the model does not register it."""

    def __init__(self):
        super().__init__()
        self.online = encoder()
        self.hidden = [frozen_copy(self.online)]

    @torch.no_grad()
    def follow(self):
        for target, online in zip(self.hidden[0].parameters(), self.online.parameters(), strict=True):
            target.mul_(0.9).add_(online, alpha=0.1)

    def forward(self, inputs):
        if self.training:
            self.follow()
        return (self.online(inputs) - self.hidden[0](inputs) + inputs).square().mean(1)


class UnitWeights(nn.Module):
    """The rows of a trained weight are scaled to length 1 in place before they are used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, inputs):
        if self.training:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return self.first(inputs).relu() @ self.weight.T * 4


class ReplacedParameter(nn.Module):
    """Every training forward assigns a parameter anew: a frozen prototype per class, made from the last batch."""

    def __init__(self):
        super().__init__()
        self.features = encoder()
        self.prototypes = nn.Parameter(torch.randn(4, 8), requires_grad=False)

    def forward(self, inputs):
        features = self.features(inputs)
        logits = features @ self.prototypes.T
        if self.training:
            moved = 0.9 * self.prototypes + 0.1 * features.detach()[:4].mean(0)
            self.prototypes = nn.Parameter(moved, requires_grad=False)
        return logits


class ActNorm(nn.Module):
    """Glow's layer: the first training batch decides scale and shift, which are trained from then on."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("initialised", torch.tensor(False))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        if self.training and not self.initialised:
            with torch.no_grad():
                self.shift.sub_(inputs.mean(0))
                self.scale.div_(inputs.std(0) + 1e-3)
                self.initialised.fill_(True)
        return self.head(((inputs + self.shift) * self.scale).tanh())
