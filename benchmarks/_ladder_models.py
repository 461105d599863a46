"""Two models and a task of a user's own, which declare their blocks."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class VAE(nn.Module):
    """Images of 8 x 8 pixels through a wide encoder and decoder; the task adds noise by sample."""

    def __init__(self, width: int = 512, depth: int = 3, latent: int = 16):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.encoder = nn.ModuleList(_block(width) for _ in range(depth))
        self.to_latent = nn.Linear(width, 2 * latent)
        self.from_latent = nn.Linear(latent, width)
        self.decoder = nn.ModuleList(_block(width) for _ in range(depth))
        self.last = nn.Linear(width, 64)

    def blocks(self) -> list[nn.Module]:
        """The layers of both halves."""
        return [*self.encoder, *self.decoder]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reconstructions, means and logarithms of variances."""
        hidden = self.first(images.flatten(1))
        for block in self.encoder:
            hidden = block(hidden)
        mean, log_variance = self.to_latent(hidden).chunk(2, dim=1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        hidden = self.from_latent(sample)
        for block in self.decoder:
            hidden = block(hidden)
        return self.last(hidden), mean, log_variance


def _block(width: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU())))


def vae_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the negative evidence lower bound, summed over the samples, their number, and no metric."""
    images = batch["inputs"].flatten(1)
    reconstruction, mean, log_variance = model(images)
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
    loss = functional.mse_loss(reconstruction, images, reduction="sum") + divergence
    return loss, len(images), {}


class LSTM(nn.Module):
    """A language model of stacked LSTM layers, each a block."""

    def __init__(self, vocab_size: int, width: int = 64, depth: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size)

    def blocks(self) -> list[nn.Module]:
        """The layers."""
        return list(self.layers)

    def features(self, tokens: Tensor) -> Tensor:
        """What the head turns into logits."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        return self.head(self.features(tokens))


class _Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.lstm(hidden)[0]
        return hidden + self.narrow(functional.gelu(self.widen(hidden)))
