"""In the shape of pytorch/examples: statements at the top level, a loop that reads globals, a loss that is a sum."""

import argparse

import torch
from absent_from_this_environment import datasets
from torch import nn, optim
from torch.nn import functional as F

args = argparse.ArgumentParser().parse_args()
train_loader = datasets.Images(args)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(784, 32)
        self.means, self.log_variances = nn.Linear(32, 20), nn.Linear(32, 20)
        self.outer = nn.Linear(20, 784)

    def encode(self, images):
        inner = F.relu(self.inner(images))
        return self.means(inner), self.log_variances(inner)

    def decode(self, codes):
        return torch.sigmoid(self.outer(codes))

    def forward(self, images):
        mean, log_variance = self.encode(images.flatten(1))
        deviation = torch.exp(0.5 * log_variance)
        return self.decode(mean + torch.randn_like(deviation) * deviation), mean, log_variance


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(decoded, images, mean, log_variance):
    reconstruction = F.binary_cross_entropy(decoded, images.flatten(1), reduction="sum")
    return reconstruction - 0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())


def train(epoch):
    model.train()
    for images, _ in train_loader:
        optimizer.zero_grad()
        decoded, mean, log_variance = model(images)
        loss = loss_function(decoded, images, mean, log_variance)
        loss.backward()
        optimizer.step()
    print(epoch)


train(1)
