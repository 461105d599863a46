"""A multi-layer perceptron for small images."""

import math

from torch import Tensor, nn

from trainapp.validation import Fraction, PositiveInt


class MLP(nn.Module):
    """Linear layers from [B, C, H, W] images, flattened, to [B, num_classes] logits.

    Args:
        width: the features of every hidden layer.
        depth: the number of linear layers; 1 is multinomial logistic regression.
        dropout: probability of dropping a hidden feature.
    """

    def __init__(
        self,
        image_shape: tuple[PositiveInt, PositiveInt, PositiveInt],
        num_classes: PositiveInt,
        width: PositiveInt = 256,
        depth: PositiveInt = 3,
        dropout: Fraction = 0.0,
    ):
        super().__init__()
        features = math.prod(image_shape)
        self.layers = nn.ModuleList()
        for _ in range(depth - 1):
            layer = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout))
            self.layers.append(layer)
            features = width
        self.head = nn.Linear(features, num_classes)

    def blocks(self) -> list[nn.Module]:
        """Return the hidden layers."""
        return list(self.layers)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
