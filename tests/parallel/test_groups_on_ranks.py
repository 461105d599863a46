"""Parameter groups by name, layer-wise decay and attributes of parameters on several ranks: as on one."""

import pytest
import tagged

from .conftest import SPREAD, TINY
from .test_equality import as_one, assert_same, error

GROUPS = (
    "optimizer.groups=[{match: norm, lr: 0.5}, {match: layers.0.attention, freeze: true}]",
    "optimizer.layer_decay=0.5",
)
SPREADS = [pytest.param(spread, marks=pytest.mark.slow) if spread == "hsdp" else spread for spread in SPREAD]
PLAIN = tuple(setting for setting in TINY if not setting.startswith("optimizer"))


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
def test_groups_and_layer_wise_decay(cell, spread):
    (plain,) = cell.run(0)
    (record, _) = as_one(cell, 2, spread, *GROUPS)
    assert error(record.weights, plain.weights) > 1e-3


@pytest.mark.parametrize("spread", SPREADS)
def test_attributes_of_parameters(cell, spread):
    (reference,) = cell.run(0, *tagged.SETTINGS, tiny=PLAIN)
    assert reference.error is None
    assert_same(cell.run(2, *tagged.SETTINGS, f"parallel={spread}", tiny=PLAIN), reference)


def test_attributes_of_parameters_that_were_built_without_memory(cell):
    for record in cell.run(2, *tagged.SETTINGS, "parallel=fsdp", "parallel.fsdp.meta_init=true", tiny=PLAIN):
        assert record.error is None
