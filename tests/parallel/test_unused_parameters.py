"""Parameters that the loss does not depend on, under DDP: it waits for their gradients, and other parameters in the
same bucket are not summed over ranks.
"""

import pytest
import torch
from runs import own_model

from .cell import TINY, Cell

pytestmark = pytest.mark.slow

UNUSED = (*TINY, "data=digits", "user_packages=[foreign]", *own_model("foreign.Unused"), "train.max_steps=2")


def test_the_first_step_is_refused_before_its_update(cell: Cell):
    for record in cell.run(2, "parallel=ddp", tiny=UNUSED):
        assert record.error is not None
        assert record.error.startswith(
            "parallel.ddp.find_unused_parameters=false: the loss does not depend on unused.weight, unused.bias, "
        )
        assert record.losses == []


@pytest.mark.parametrize("size", [4, 8])
def test_with_the_setting_two_ranks_train_as_one(cell: Cell, size):
    settings = f"batch.micro_size={size}"
    (one,) = cell.run(0, settings, tiny=UNUSED)
    for record in cell.run(2, "parallel=ddp", "parallel.ddp.find_unused_parameters=true", settings, tiny=UNUSED):
        torch.testing.assert_close(record.weights, one.weights, rtol=1e-6, atol=1e-7)
