"""Before training, every collective that training uses has been used on every group."""

import pytest

from . import cells
from .conftest import GPT, TINY

# One forward and backward, clipping, fp16's flags, a log step.
ALL = ("train.max_steps=2", "train.grad_clip=0.1", "precision=fp16", "precision.initial_scale=256")


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "world"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_nothing_is_used_for_the_first_time(cell, spread, world):
    for used in cell.run(
        world, f"parallel={spread}", *ALL, f"batch.global_size={4 * world}", tiny=(*TINY, *GPT),
        function=cells.train_after_warming_up,
    ):  # fmt: skip
        assert used.training, "nothing was recorded: this proves nothing"
        assert used.training <= used.warming_up
        groups = {group for _, group in used.training}
        assert len(groups) == {"ddp": 1, "fsdp": 1, "hsdp": 3}[spread]  # one copy is sharded over all ranks
