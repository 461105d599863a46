"""A model whose parameters carry learning rates as attributes, and an optimizer that reads them."""

import torch
from torch import nn

SETTINGS = (
    *("user_packages=[tagged]", "model._target_=tagged.Tagged", "data=digits"),
    *("optimizer._target_=tagged.ByTag", "optimizer.lr=0.1", "task=classification"),
)
RATES = [0.5, 0.1, 0.05]  # of the groups


class Tagged(nn.Module):
    """Says of a parameter inside a block, and of one outside of all, how fast they are to learn."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, num_classes)
        self.init_weights()
        self.body[0].weight.lr_scale, self.head.bias.lr_scale = 5.0, 0.5

    def init_weights(self):
        """For meta_init."""
        self.body[0].reset_parameters()
        self.head.reset_parameters()

    def forward(self, images):
        return self.head(self.body(images.flatten(1)))

    def blocks(self):
        return [self.body]


class ByTag(torch.optim.SGD):
    """SGD that reads these."""

    @staticmethod
    def parameter_groups(model, weight_decay):
        """A group for each scale."""
        by_scale = {}
        for parameter in model.parameters():
            by_scale.setdefault(getattr(parameter, "lr_scale", 1.0), []).append(parameter)
        assert sorted(by_scale) == [0.5, 1.0, 5.0], "an attribute is lost"
        return [{"params": own, "lr": 0.1 * scale} for scale, own in by_scale.items()]
