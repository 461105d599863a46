"""A small denoising diffusion model on images, for `overhead.py --draws`: noise and its level are drawn in the loss."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Denoiser(nn.Module):
    """Convolutions at two resolutions, conditioned on the level of the noise."""

    def __init__(self, image_shape: tuple[int, int, int], width: int = 32):
        super().__init__()
        channels = image_shape[0]
        self.first, self.level = nn.Conv2d(channels, width, 3, padding=1), nn.Linear(2, width)
        self.low = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.high = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        x = self.first(noisy) + self.level(level)[:, :, None, None]
        return self.high(x + F.interpolate(self.low(F.avg_pool2d(x, 2)), scale_factor=2))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """The sum of the samples' mean squared errors."""
    images = batch["inputs"]
    angle = torch.rand(len(images), 1) * (math.pi / 2)
    level, noise = torch.cat([angle.cos(), angle.sin()], 1), torch.randn_like(images)
    cos, sin = level[:, :, None, None, None].unbind(1)
    errors = F.mse_loss(model(cos * images + sin * noise, level), noise, reduction="none")
    return errors.flatten(1).mean(1).sum(), len(images), {}
