"""Several ranks that follow a plan compare their highest peak with it."""

import pytest

from .test_equality import slow

PLANNED = (
    "batch.micro_size=plan",
    "batch.global_size=16",
    "train.max_steps=8",
    "oom.clean_steps=20",
    "parallel.devices=2",
)
LENGTHS = "data.min_length=null"


def said(records):
    return [[line for line in record.log if "were planned" in line] for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [slow("ddp"), "fsdp"])
def test_two_ranks_that_do_as_planned_get_no_word(cell, strategy):
    records = cell.run(2, f"parallel={strategy}", LENGTHS, *PLANNED, limit=300.0)
    assert [record.error for record in records] == [None, None]
    assert any(", as planned in " in line for line in records[0].log)
    assert said(records) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
def test_two_ranks_that_need_more_later_get_one(cell, strategy):
    growing = ("user_packages=[planned_models]", "task=planned_models.Metered", "train.max_steps=30")
    records = cell.run(2, f"parallel={strategy}", LENGTHS, *PLANNED, *growing, "oom.clean_steps=40", limit=300.0)
    assert [record.error for record in records] == [None, None]
    (note,), others = said(records)  # rank 0 writes
    assert note.startswith("batch.micro_size=plan: step ")
    assert others == []
