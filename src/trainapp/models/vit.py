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
    """Return the largest patch size up to 16 that divides both sides and gives 49 patches or more; else 1."""
    for size in range(LARGEST_PATCH, 1, -1):
        divides_both_sides = height % size == 0 and width % size == 0
        patches = (height // size) * (width // size)
        if divides_both_sides and patches >= FEWEST_PATCHES:
            return size
    return 1


class Attention(nn.Module):
    """Self-attention over all patches, [B, N, width] to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.unbind(2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
        )
        heads_side_by_side = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.output(heads_side_by_side)


class ViT(nn.Module):
    """A transformer from [B, C, H, W] images to [B, num_classes] logits.

    Args:
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
        if patch_size is None:
            patch_size = auto_patch(rows, columns)
        if rows % patch_size or columns % patch_size:
            raise ValueError(
                f"model.patch_size={patch_size}: must divide the image's {rows} x {columns} pixels; choose a divisor, "
                "or null"
            )
        if width % heads:
            raise ValueError(f"model.width={width} must be divisible by model.heads={heads}")
        patches = (rows // patch_size) * (columns // patch_size)
        hidden = max(1, round(mlp_ratio * width))

        self.embedding = nn.Conv2d(channels, width, patch_size, stride=patch_size)
        # three-dimensional, so that Muon does not treat it as a hidden matrix
        self.positions = nn.Parameter(torch.empty(1, patches, width))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = Attention(width, heads, dropout)
            up = nn.Linear(width, hidden)
            down = nn.Linear(hidden, width)
            mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))
            self.layers.append(Block(attention, mlp, width, dropout, norm=nn.LayerNorm))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Reinitialise every parameter: standard deviation 0.02 and biases of 0; the patch embedding by its fan-in
        (LeCun), like any first layer.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

        fan_in = self.embedding.weight[0].numel()
        nn.init.normal_(self.embedding.weight, std=fan_in**-0.5)
        nn.init.zeros_(self.embedding.bias)
        nn.init.normal_(self.positions, std=INIT_STD)

    def blocks(self) -> list[nn.Module]:
        """Return the transformer blocks, first to last."""
        return list(self.layers)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)  # [B, width, H / patch_size, W / patch_size]
        x = x.flatten(2).transpose(1, 2)  # [B, N, width]
        x = self.dropout(x + self.positions)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x).mean(1)
        return self.head(x)
