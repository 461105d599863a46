"""Models that keep state in buffers, written in all the ways there are."""

import torch
from torch import nn
from torch.nn.utils import parametrizations


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, inputs):
        return self.layers(inputs)


class SpectralNorm(nn.Module):
    """Power iteration: two buffers move in every training forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(8, 16)),
            nn.ReLU(),
            parametrizations.spectral_norm(nn.Linear(16, 4)),
        )

    def forward(self, inputs):
        return self.layers(inputs)


class LazyStatistics(nn.Module):
    """One buffer is None until the first training forward, which registers another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", None)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, inputs):
        if self.centre is None:
            self.centre = torch.zeros(inputs.shape[1:])
        if self.training and not hasattr(self, "scale"):
            self.register_buffer("scale", inputs.detach().std(0))
        if self.training:
            self.centre.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return self.layers((inputs - self.centre) / getattr(self, "scale", 1.0))


class Reassigned(nn.Module):
    """`self.mean = ...`: another tensor after every forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, inputs):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return self.layers(inputs - self.mean)


class WrittenThroughNumPy(nn.Module):
    """Histogram of the inputs' signs, counted by NumPy in the buffer's own memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.ones(8))
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, inputs):
        if self.training:
            view = self.counts.numpy()
            view += (inputs.detach().numpy() > 0).sum(0)
        return self.layers(inputs * self.counts / self.counts.sum())


class WritesInEvaluation(nn.Module):
    """A recurrent network that continues from where the last batch ended, in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 4)
        self.register_buffer("hidden", torch.zeros(16))

    def forward(self, inputs):
        hidden = self.cell(inputs, self.hidden.clone().expand(len(inputs), -1))
        self.hidden.copy_(hidden.detach().mean(0))
        return self.head(hidden)
