"""Models as others write them, for `plan_accuracy.py --foreign`: what a trace may get wrong is in one of them each.

Images are [B, 3, 32, 32] and give logits [B, 10]; tokens are [B, T] and give logits [B, T, vocabulary].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WIDTH, VOCABULARY = 10, 32, 512


def convolution(before: int, after: int) -> nn.Sequential:
    """As in U-Net, with GroupNorm."""
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Two levels with skip connections; every pixel votes for a class."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.first, self.down = convolution(3, width), convolution(width, 2 * width)
        self.bottom = convolution(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.joined, self.up_again = convolution(4 * width, 2 * width), nn.Upsample(scale_factor=2, mode="bilinear")
        self.last, self.head = convolution(3 * width, width), nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.first(images)
        down = self.down(F.max_pool2d(first, 2))
        joined = self.joined(torch.cat([self.up(self.bottom(F.max_pool2d(down, 2))), down], 1))
        return self.head(self.last(torch.cat([self.up_again(joined), first], 1))).mean((2, 3))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm over channels, inverted bottleneck, scale, stochastic depth by sample."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, images: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(images).permute(0, 2, 3, 1))
        inner = (self.scale * self.narrow(F.gelu(self.wide(inner)))).permute(0, 3, 1, 2)
        keep = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.9 if self.training else 1.0
        return images + inner * keep


class ConvNeXt(nn.Module):
    """Two stages of two blocks."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(
            ConvNeXtBlock(width), ConvNeXtBlock(width), nn.Conv2d(width, 2 * width, 2, stride=2),
            ConvNeXtBlock(2 * width), ConvNeXtBlock(2 * width),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Recurrent(nn.Module):
    """kind: LSTM, GRU or RNN. In oneDNN, an LSTM has a workspace whose size no meta kernel knows."""

    def __init__(self, kind: str = "LSTM", width: int = 64, layers: int = 2, bidirectional: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = getattr(nn, kind)(width, width, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear((1 + bidirectional) * width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


class Packed(Recurrent):
    """The sequences' lengths are values."""

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens % 8 + 1).amax(1) * tokens.shape[1] // 8
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(tokens), lengths, True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], True, total_length=tokens.shape[1])
        return self.head(hidden)


class Experts(nn.Module):
    """A mixture of experts: each token goes to the `top` best of `count`."""

    def __init__(self, width: int = 64, count: int = 4, top: int = 2, form: str = "equal"):
        super().__init__()
        self.count, self.top, self.form = count, top, form
        self.embedding, self.router = nn.Embedding(VOCABULARY, width), nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).flatten(0, 1)
        weights, chosen = self.router(hidden).softmax(-1).topk(self.top)
        total = torch.zeros_like(hidden)
        one_hot = F.one_hot(chosen, self.count).permute(2, 0, 1) if self.form == "one-hot" else None
        for number, expert in enumerate(self.experts):
            mask = chosen == number if one_hot is None else one_hot[number]
            rows, place = torch.where(mask)
            total = total.index_add(0, rows, (expert(hidden[rows]) * weights[rows, place, None]).to(total.dtype))
        return self.head(total.view(*tokens.shape, -1))


class EarlyExit(nn.Module):
    """Further layers only while the model is unsure."""

    def __init__(self, width: int = 256, sure: float = 0.5):
        super().__init__()
        self.sure = sure
        self.first = nn.Linear(3 * 32 * 32, width)
        self.layers, self.head = nn.ModuleList(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1)).relu()
        for layer in self.layers:
            logits = self.head(hidden)
            if logits.softmax(-1).amax(-1).mean() > self.sure:
                return logits
            hidden = layer(hidden).relu()
        return self.head(hidden)


class ReadsItem(nn.Module):
    """Scales by a value that it reads, and keeps its history."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.first, self.last = nn.Linear(3 * 32 * 32, width), nn.Linear(width, CLASSES)
        self.history: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1)).relu()
        self.history.append(hidden.detach().abs().mean().item())
        return self.last(hidden / max(self.history[-1], 1e-3))


class Selects(nn.Module):
    """Computes more for the elements above a bound; `how`: by index, by mask, or by their distinct values."""

    def __init__(self, width: int = 256, bound: float = 0.5, how: str = "mask"):
        super().__init__()
        self.bound, self.how = bound, how
        self.first, self.last = nn.Linear(3 * 32 * 32, width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        above = hidden > self.bound
        if self.how == "mask":
            extra = hidden[above]
        elif self.how == "index":
            extra = hidden.flatten()[above.flatten().nonzero().squeeze(1)]
        else:
            extra = hidden.detach().round().unique()
        return self.last(hidden) + extra.exp().log1p().sum() / hidden.numel()


class Cube(torch.autograd.Function):
    """x ** 3, keeping x alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs * inputs * inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        return 3 * inputs.square() * gradient


class OwnFunction(nn.Module):
    """A custom autograd.Function, and a buffer that the forward writes in place."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.first, self.last = nn.Linear(3 * 32 * 32, width), nn.Linear(width, CLASSES)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.last(Cube.apply(hidden - self.mean))


class Tied(nn.Module):
    """An embedding whose weight is the head's, too, behind torch's own Transformer."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


class Lazy(nn.Module):
    """Layers that get their shapes from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LazyConv2d(32, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.LazyLinear(CLASSES),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class HalfWhenBuilt(nn.Module):
    """Converts itself: weights in bf16, tied, with a cast around them."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(tokens))).float()
