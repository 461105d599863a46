"""Parameter groups by name and layer-wise decay on several ranks: as on one."""

import pytest

from .conftest import SPREAD
from .test_equality import as_one, error

GROUPS = (
    "optimizer.groups=[{match: norm, lr: 0.5}, {match: layers.0.attention, freeze: true}]",
    "optimizer.layer_decay=0.5",
)
SPREADS = [pytest.param(spread, marks=pytest.mark.slow) if spread == "hsdp" else spread for spread in SPREAD]


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
def test_groups_and_layer_wise_decay(cell, spread):
    (plain,) = cell.run(0)
    (record, _) = as_one(cell, 2, spread, *GROUPS)
    assert error(record.weights, plain.weights) > 1e-3
