"""Several optimizers: a GAN whose generator and discriminator are updated in turn, on the same samples."""

import torch
import torch.nn.functional as F
from torch import nn


class GAN(nn.Module):
    """Vectors [8] from noise [4]. The generator has a BatchNorm, and the discriminator drops features: a retry must
    restore the statistics of the one and the draws of the other.
    """

    def __init__(self, dropout=0.2):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, inputs, trains_generator):
        """Generated vectors, and the discriminator's verdicts on real and on generated ones."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_generator):
            fakes = self.generator(torch.randn(len(inputs), 4))
        return fakes, self.discriminator(inputs), self.discriminator(fakes)

    def blocks(self):
        return [self.generator, self.discriminator]


def discriminate(model, batch):
    """The discriminator's loss, on real and on generated vectors."""
    _, real, fake = model(batch["inputs"], False)
    right = ((real > 0).sum() + (fake < 0).sum()) / 2
    return F.softplus(-real).sum() + F.softplus(fake).sum(), len(real), {"right": right}


def generate(model, batch):
    """The generator's loss: what the discriminator says of its vectors."""
    _, _, fake = model(batch["inputs"], True)
    return F.softplus(-fake).sum(), len(fake), {}


def distance(model, batch):
    """What is evaluated: how far generated vectors are from real ones."""
    fakes, _, _ = model(batch["inputs"], True)
    return (fakes - batch["inputs"]).square().mean(1).sum(), len(fakes), {}


class SteadyGAN(GAN):
    """Without anything that depends on ranks or micro-batches: its noise is made of the samples."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.generator[1] = nn.GroupNorm(2, 16)

    def forward(self, inputs, trains_generator):
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_generator):
            fakes = self.generator((7 * inputs[:, :4]).sin())
        return fakes, self.discriminator(inputs), self.discriminator(fakes)
