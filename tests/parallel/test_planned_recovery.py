"""After the first error of several ranks, rank 0 asks the plan for all of them."""

import pytest

from trainapp.config import compose
from trainapp.oom import planned
from trainapp.planning import planner

from .conftest import GPT, TINY
from .test_equality import slow

# Half of a sample's bytes above what 4 need: gloo may free a message of FSDP late.
SEARCHING = ("batch.micro_size=auto", "oom.grow=true", "oom.clean_steps=1", "train.max_steps=8", "parallel.devices=2")
LENGTHS = {"alike": "data.min_length=null", "different": "data.min_length=4"}


def limit_between(cell, *overrides):
    """Bytes with which 4 samples fit and 5 do not."""
    sizes = (4, 5)
    peaks = [cell.run(2, *overrides, f"batch.micro_size={size}", "batch.global_size=20")[0].peak for size in sizes]
    assert peaks[0] < peaks[1]
    return f"memory.limit={sum(peaks) // 2}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "lengths"),
    [("ddp", "different"), ("fsdp", "alike"), slow("ddp", "alike"), slow("fsdp", "different")],
)
def test_two_ranks_meet_one_error_and_continue_with_the_planned_size(cell, strategy, lengths):
    overrides = (f"parallel={strategy}", LENGTHS[lengths])
    limit = limit_between(cell, *overrides)
    ours = (*overrides, *SEARCHING, limit, "batch.global_size=20")
    config = compose.from_command_line([*TINY, *GPT, *ours, "plan.world=2"])
    largest = planner.plan(config, only=("training",))[0]["largest_micro_size"]
    assert 1 < largest < 10
    records = cell.run(2, *ours, "oom.plan=true", limit=300.0)
    for record in records:
        assert record.error is None
        assert [(failure["old"], failure["new"]) for failure in record.failures] == [(10, largest)]
        assert record.shapes[max(record.shapes)] == largest
        assert len(record.sizes) == 8
    halved = cell.run(2, *ours)
    assert halved[0].failures[0]["new"] == 5
    assert len(halved[0].failures) > 1


@pytest.mark.slow
def test_a_plan_that_rank_zero_does_not_get_leaves_all_ranks_with_half(cell):
    limit = limit_between(cell, "parallel=ddp", LENGTHS["alike"])
    records = cell.run(2, "parallel=ddp", LENGTHS["alike"], *SEARCHING, limit, "batch.global_size=20", "oom.plan=true",
                       function=train_without_patience, limit=300.0)  # fmt: skip
    for record in records:
        assert record.error is None
        assert (record.failures[0]["old"], record.failures[0]["new"]) == (10, 5)
    assert any("took longer than 0 s; halving instead" in line for line in records[0].log)


def train_without_patience(*arguments):
    """As `cells.train`, on a worker of the pool."""
    from . import cells

    before, planned.PATIENCE, planned.ATTEMPTS = (planned.PATIENCE, planned.ATTEMPTS), 0.01, 0
    try:
        return cells.train(*arguments)
    finally:
        planned.PATIENCE, planned.ATTEMPTS = before
