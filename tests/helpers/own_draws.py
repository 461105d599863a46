"""Models that draw random numbers, as users write them; each computes the loss of each sample itself."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainapp.tasks import EmbeddingTask


def task(model, batch):
    """The sum of the samples' losses."""
    losses = model(batch["inputs"].flatten(1), batch["targets"])
    return losses.sum(), len(losses), {"first": losses.square().sum()}


class Own(nn.Module):
    """A base: digits as eight tokens of eight values, and an answer per class."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(64, num_classes)

    def draw(self, x: Tensor) -> Tensor:
        """[B, 8, 8] to [B, 8, 8]."""
        raise NotImplementedError

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.draw(self.layer(inputs.view(-1, 8, 8)))
        return F.cross_entropy(self.head(x.flatten(1)), targets, reduction="none")


class Transformer(Own):
    """A GPT's block with dropout in attention and after it; optionally checkpointed by torch."""

    def __init__(self, num_classes: int, checkpointed: bool = False):
        super().__init__(num_classes)
        self.qkv, self.out, self.checkpointed = nn.Linear(8, 24), nn.Linear(8, 8), checkpointed

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        rate = 0.2 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(-2)), 0.2, self.training)

    def blocks(self) -> list[nn.Module]:
        return [self.layer, self.out]

    def draw(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


class TimeFirst(Own):
    """nn.MultiheadAttention and nn.LSTM, whose batches are the second dimension."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.attention, self.lstm = nn.MultiheadAttention(8, 2, dropout=0.2), nn.LSTM(8, 8, 2, dropout=0.2)

    def draw(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = x + self.attention(x, x, x)[0]
        return (x + self.lstm(x)[0]).transpose(0, 1)


class Depth(Own):
    """Stochastic depth, and noise by hand, flattened and on two views of each sample, whose branch begins at 0."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.gain = nn.Parameter(torch.zeros(()))

    def draw(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + F.dropout(x, 0.2) * x.new_empty(len(x), 1, 1).bernoulli_(0.8)
            x = x + 0.1 * torch.randn(len(x), 8, 1)
            first, second = F.dropout(torch.cat([x, x * 2]), 0.2).chunk(2)
            x = x + self.gain * (first + second)
        return x


class VAE(nn.Module):
    """Draws in evaluation, too."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        mean, width = self.encoder(inputs).chunk(2, -1)
        latent = torch.distributions.Normal(mean, F.softplus(width)).rsample()
        return F.mse_loss(self.decoder(latent), inputs, reduction="none").mean(1) + mean.square().mean(1)


class Diffusion(nn.Module):
    """A denoising model on 64 values: a step of the noise's schedule and noise for each sample."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(66, 32), nn.SiLU(), nn.Linear(32, 64))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        step = torch.randint(0, 100, (len(inputs),))
        noise, angle = torch.randn_like(inputs), (step / 100 * math.pi / 2)[:, None]
        noisy = angle.cos() * inputs + angle.sin() * noise
        found = self.net(torch.cat([noisy, angle.cos(), angle.sin()], 1))
        return F.mse_loss(found, noise, reduction="none").mean(1)


class Shared(Own):
    """Draws the same for all samples."""

    def draw(self, x: Tensor) -> Tensor:
        return x * torch.rand(8)


class Noise(nn.Module):
    """Noise that all samples share."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(8)


class SharedByALayer(Own):
    """A layer of it draws the same for all samples."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.noise = Noise()

    def draw(self, x: Tensor) -> Tensor:
        return self.noise(x)


class Reversed(Own):
    """Noise for two views of each sample, of which the second takes it in reverse order."""

    def draw(self, x: Tensor) -> Tensor:
        if self.training:
            first, second = torch.randn(2 * len(x), 8, 8).chunk(2)
            x = x * (1 + first) + second.flip(0)
        return x


class Graph:
    """A data set of a single sample, whose nodes are no samples."""

    def __init__(self, split: str):
        self.nodes = torch.arange(24.0).view(1, 12, 2)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"nodes": self.nodes[index]}


class Nodes(nn.Module):
    """Drops out values of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, nodes: Tensor) -> Tensor:
        return self.layer(F.dropout(nodes.squeeze(0), 0.5, self.training))


def of_nodes(model, batch):
    return model(batch["nodes"]).square().sum(), 12, {}


class Contrasted(EmbeddingTask):
    """Each sample's embedding against all others'."""

    def embed(self, model, batch):
        x = model.layer(batch["inputs"].view(-1, 8, 8))
        first, second = model.head(model.draw(torch.cat([x, x.flip(1)])).flatten(1)).chunk(2)
        return {"own": F.normalize(first, dim=1), "other": F.normalize(second, dim=1)}

    def loss_of_embeddings(self, embeddings):
        own = embeddings["own"]
        return F.cross_entropy(own @ embeddings["other"].T * 5, torch.arange(len(own)), reduction="sum"), len(own), {}


class Labelled(Contrasted):
    """Its loss gets the targets, which have one dimension, by way of the embeddings."""

    def embed(self, model, batch):
        return super().embed(model, batch) | {"targets": batch["targets"]}


contrasted = Contrasted()
labelled = Labelled()
