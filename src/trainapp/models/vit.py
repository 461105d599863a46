"""A vision transformer: an encoder over a sequence of image patches, classified by their mean.

Architecture: Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv:2010.11929), in the plain form of Beyer, Zhai
and Kolesnikov, "Better plain ViT baselines for ImageNet-1k" (arXiv:2205.01580): the mean over patches instead of a
class token. Positions are learned.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainapp.models.gpt import Block
from trainapp.validation import Fraction, PositiveFloat, PositiveInt

INIT_STD = 0.02
LARGEST_PATCH = 16  # largest automatic patch size, in pixels
FEWEST_PATCHES = 49  # fewest patches with an automatic size (7 x 7), if the image is large enough


def auto_patch(height: int, width: int) -> int:
    """The largest patch size up to 16 that divides both sides and gives at least 49 patches; 1 for small images."""
    sizes = [size for size in range(1, LARGEST_PATCH + 1) if height % size == width % size == 0]
    return max((size for size in sizes if height * width >= FEWEST_PATCHES * size**2), default=1)


class Attention(nn.Module):
    """Self-attention over all patches, [B, N, width] to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class ViT(nn.Module):
    """Maps [B, C, H, W] images to [B, num_classes] logits.

    patch_size: side of a patch in pixels; it must divide height and width. None: see `auto_patch`.
    mlp_ratio: hidden features of a feed-forward layer over width.
    dropout: dropout of attention weights, of each branch before it is added, and of the embedded patches.
    Raises ValueError for sizes that do not divide evenly.
    """

    def __init__(
        self,
        image_shape: tuple[PositiveInt, PositiveInt, PositiveInt],
        num_classes: PositiveInt,
        patch_size: PositiveInt | None = None,
        depth: PositiveInt = 6,
        width: PositiveInt = 192,
        heads: PositiveInt = 3,
        mlp_ratio: PositiveFloat = 4.0,
        dropout: Fraction = 0.0,
    ):
        super().__init__()
        channels, rows, columns = image_shape
        size = auto_patch(rows, columns) if patch_size is None else patch_size
        if rows % size or columns % size:
            raise ValueError(
                f"model.patch_size={size}: must divide the image's {rows} x {columns} pixels; choose a divisor, or null"
            )
        if width % heads:
            raise ValueError(f"model.width={width} must be divisible by model.heads={heads}")
        self.embedding = nn.Conv2d(channels, width, size, stride=size)
        # three-dimensional, so that Muon does not treat it as a hidden matrix
        self.positions = nn.Parameter(torch.empty(1, rows // size * (columns // size), width))
        self.dropout = nn.Dropout(dropout)
        hidden = max(1, round(mlp_ratio * width))
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = Attention(width, heads, dropout)
            up, down = nn.Linear(width, hidden), nn.Linear(hidden, width)
            mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))
            self.layers.append(Block(attention, mlp, width, dropout, norm=nn.LayerNorm))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialises every parameter: standard deviation 0.02 and biases of 0; the patch embedding by its fan-in
        (LeCun), like any first layer.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        nn.init.normal_(self.embedding.weight, std=self.embedding.weight[0].numel() ** -0.5)
        nn.init.zeros_(self.embedding.bias)
        nn.init.normal_(self.positions, std=INIT_STD)

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, first to last."""
        return list(self.layers)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs).flatten(2).transpose(1, 2)
        x = self.dropout(x + self.positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))
