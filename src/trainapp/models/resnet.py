"""Residual networks for images of any size, with torchvision's parameter names so that its weights load.

Architecture: He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), in the variant
known as v1.5, whose bottlenecks stride in the 3x3 convolution. The last norm of each residual branch starts
at zero (Goyal et al., arXiv:1706.02677), so that every block starts as the identity.
"""

import math
from collections.abc import Callable
from typing import Literal, NoReturn

from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.validation import PositiveInt

# from 64 pixels on, the 7x7 stem's 4-fold reduction leaves the first stage 16 x 16 or more
SMALL_STEM_BELOW = 64
MOST_GROUPS = 32  # of group norm (Wu and He, arXiv:1803.08494)

Norm = Callable[[int], nn.Module]  # makes a norm for a number of channels


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the size of the image, but for the stride."""
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


def _group_norm(channels: int) -> nn.GroupNorm:
    """Return a norm with as many groups as divide both 32 and the channels."""
    return nn.GroupNorm(math.gcd(MOST_GROUPS, channels), channels)


def _downsample(channels_in: int, channels_out: int, stride: int, norm: Norm) -> nn.Module | None:
    """Return what gives a block's input the shape of its output; None if it has that shape."""
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(_conv(channels_in, channels_out, 1, stride), norm(channels_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them."""

    expansion = 1  # channels of the output over `channels`

    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.bn1 = norm(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(channels_in, channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(branch + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut around them; the stride is in the 3x3."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm):
        super().__init__()
        channels_out = channels * self.expansion
        self.conv1 = _conv(channels_in, channels, 1)
        self.bn1 = norm(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = norm(channels)
        self.conv3 = _conv(channels, channels_out, 1)
        self.bn3 = norm(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(channels_in, channels_out, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(branch + shortcut)


# By depth: the kind of block, and the number of blocks in each stage.
LAYOUTS = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """A residual network from [B, C, H, W] images to [B, num_classes] logits.

    Args:
        norm: "group" makes the result independent of the micro-batch; "batch" normalises over it.
        width: channels of the first stage; each of the three later stages doubles them.
        stem: "large" is a 7x7 convolution of stride 2 and a max-pool; "small" is a 3x3 convolution that keeps the
            size; "auto" takes the small one when the shorter side is under 64 pixels.
    """

    def __init__(
        self,
        image_shape: tuple[PositiveInt, PositiveInt, PositiveInt],
        num_classes: PositiveInt,
        depth: Literal[18, 34, 50, 101, 152] = 18,
        norm: Literal["batch", "group"] = "batch",
        width: PositiveInt = 64,
        stem: Literal["auto", "small", "large"] = "auto",
    ):
        super().__init__()
        self.image_shape = tuple(image_shape)
        image_channels, *size = self.image_shape
        if stem == "auto":
            stem = "small" if min(size) < SMALL_STEM_BELOW else "large"
        block, counts = LAYOUTS[depth]
        make_norm = nn.BatchNorm2d if norm == "batch" else _group_norm

        # The stem; the large one reduces the size 4-fold.
        if stem == "small":
            self.conv1 = _conv(image_channels, width, 3)
        else:
            self.conv1 = _conv(image_channels, width, 7, stride=2)
        self.bn1 = make_norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.Identity()
        if stem == "large":
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

        # Each stage after the first halves the size and doubles the channels.
        expansion = block.expansion
        self.layer1 = _stage(block, counts[0], width, width, 1, make_norm)
        self.layer2 = _stage(block, counts[1], expansion * width, 2 * width, 2, make_norm)
        self.layer3 = _stage(block, counts[2], expansion * 2 * width, 4 * width, 2, make_norm)
        self.layer4 = _stage(block, counts[3], expansion * 4 * width, 8 * width, 2, make_norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(expansion * 8 * width, num_classes)

        # Normalising a single value is undefined, and in a last stage of 1 x 1 one sample has only one per channel.
        reduction = 8 if stem == "small" else 32  # of the size, by all strides
        is_one_pixel = max(size) <= reduction
        is_by_channel = norm == "batch" or MOST_GROUPS % (8 * width) == 0
        self.smallest_micro_batch = 2 if is_one_pixel and is_by_channel else 1
        self.init_weights()

    def init_weights(self) -> None:
        """Reinitialise every parameter: fan-out Kaiming convolutions, and blocks that start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.Linear):
                module.reset_parameters()

        # A block whose branch ends in zeros is the identity.
        for block in self.blocks():
            last_norm = block.bn3 if isinstance(block, Bottleneck) else block.bn2
            nn.init.zeros_(last_norm.weight)

    def blocks(self) -> list[nn.Module]:
        """Return the residual blocks, first to last."""
        return [*self.layer1, *self.layer2, *self.layer3, *self.layer4]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) < self.smallest_micro_batch:
            self._refuse_single_sample()
        x = self.relu(self.bn1(self.conv1(inputs)))
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x).flatten(1)
        return self.fc(x)

    def _refuse_single_sample(self) -> NoReturn:
        norm = "group" if isinstance(self.bn1, nn.GroupNorm) else "batch"
        _, height, width = self.image_shape
        raise UserError(
            f"model.norm={norm} with images of {height} x {width} pixels: in a micro-batch of 1 its last stage has one "
            "value per statistic; use batch.micro_size=2 or more, data.drop_last=true where an epoch ends on one "
            "sample, or model.norm=group with a model.width of 8 or more"
        )


def _stage(block: type, count: int, channels_in: int, channels: int, stride: int, norm: Norm) -> nn.Sequential:
    """Return a sequence of blocks, of which the first has the stride and changes the number of channels."""
    blocks = [block(channels_in, channels, stride, norm)]
    for _ in range(count - 1):
        blocks.append(block(channels * block.expansion, channels, 1, norm))
    return nn.Sequential(*blocks)
