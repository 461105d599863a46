"""A loss of embeddings on several ranks compares the samples of all: as on one rank."""

import pytest
from faults import Fault

from .cell import TINY, needs_reset
from .comparing import assert_same, errors

ENCODER = (
    *("model=mlp", "model._target_=own_tasks.Encoder", "~model.depth", "model.width=16", "model.dropout=0"),
    *("+model.norm=false", "data=digits", "user_packages=[own_tasks]", "every.eval=4"),
)
TASK = "task=own_tasks.mirrored"
SPREADS = ["ddp", pytest.param("fsdp", marks=needs_reset), pytest.param("hsdp", marks=[needs_reset, pytest.mark.slow])]


def run(cell, world, *overrides, **options):
    return cell.run(world, *ENCODER, *overrides, tiny=TINY, **options)


def reference(cell, task=TASK):
    (record,) = cell.reference(0, *ENCODER, task, tiny=TINY)
    return record


def assert_as_one(cell, records):
    """Also in the evaluation, whose samples are compared `batch.global_size` at a time."""
    expected = reference(cell)
    assert_same(records, expected)
    for record in records:
        assert record.evaluated == [pytest.approx(each, rel=1e-5) for each in expected.evaluated]
    assert expected.evaluated


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
def test_as_on_one_rank(cell, spread):
    assert_as_one(cell, run(cell, 2, TASK, f"parallel={spread}"))


@pytest.mark.slow
def test_as_on_one_rank_with_uneven_shares(cell):
    assert_as_one(cell, run(cell, 3, TASK, "parallel=ddp"))


def test_the_samples_of_one_rank_are_another_loss(cell):
    """Negative control."""
    wrong = ("task=own_tasks.per_micro_batch", "train.check_loss=false", "batch.micro_size=8")
    for record in run(cell, 2, *wrong, "parallel=ddp"):
        assert record.error is None
        assert errors(record, reference(cell))[0] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "phase"), [("ddp", "forward"), pytest.param("fsdp", "backward", marks=needs_reset)])
def test_one_rank_runs_out_of_memory(cell, spread, phase):
    records = run(cell, 2, TASK, f"parallel={spread}", faults=[Fault(phase, 2, rank=1)])
    assert [len(record.failures) for record in records] == [1, 1]
    assert records[0].schedule == {1: 4, 2: 2}
    assert_as_one(cell, records)
