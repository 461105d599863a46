"""Parameter groups by name, layer-wise decay and attributes of parameters on several ranks: as on one."""

import pytest
import torch
from torch import nn

from .conftest import SPREAD, TINY
from .test_equality import as_one, assert_same, error

GROUPS = (
    "optimizer.groups=[{match: norm, lr: 0.5}, {match: layers.0.attention, freeze: true}]",
    "optimizer.layer_decay=0.5",
)
SPREADS = [pytest.param(spread, marks=pytest.mark.slow) if spread == "hsdp" else spread for spread in SPREAD]
TAGGED = (
    *("user_packages=[parallel]", "model._target_=parallel.test_groups_on_ranks.Tagged", "data=digits"),
    *("optimizer._target_=parallel.test_groups_on_ranks.ByTag", "optimizer.lr=0.1", "task=classification"),
)
PLAIN = tuple(setting for setting in TINY if not setting.startswith("optimizer"))


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
        found = {}
        for parameter in model.parameters():
            found.setdefault(getattr(parameter, "lr_scale", 1.0), []).append(parameter)
        assert sorted(found) == [0.5, 1.0, 5.0], "an attribute is lost"
        return [{"params": own, "lr": 0.1 * scale} for scale, own in found.items()]


@pytest.mark.parametrize("spread", SPREADS)
def test_groups_and_layer_wise_decay(cell, spread):
    (plain,) = cell.run(0)
    (record, _) = as_one(cell, 2, spread, *GROUPS)
    assert error(record.weights, plain.weights) > 1e-3


@pytest.mark.parametrize("spread", SPREADS)
def test_attributes_of_parameters(cell, spread):
    (reference,) = cell.run(0, *TAGGED, tiny=PLAIN)
    assert reference.error is None
    assert_same(cell.run(2, *TAGGED, f"parallel={spread}", tiny=PLAIN), reference)


def test_attributes_of_parameters_that_were_built_without_memory(cell):
    for record in cell.run(2, *TAGGED, "parallel=fsdp", "parallel.fsdp.meta_init=true", tiny=PLAIN):
        assert record.error is None
