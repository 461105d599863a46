"""Metrics with a state and callbacks on several ranks: the same values as on one, and one verdict for all."""

import pytest
from faults import Fault

from .cell import GPT, TINY

pytestmark = pytest.mark.slow

EVALUATION = ("every.eval=1", "batch.eval_micro_size=8", "train.max_steps=1", "user_packages=[own_hooks]")
F1 = "+metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, average: macro}"
CORRECT = "+metrics.mine={_target_: own_hooks.Correct}"
IMAGES = ("model=mlp", "model.width=16", "data=synthetic_images", "data.size=64", "data.image_shape=[3,8,8]")


def callback(kind, **arguments):
    inner = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"+callbacks.mine={{_target_: own_hooks.{kind}{inner}}}"


@pytest.mark.parametrize("size", [37, 2])
def test_the_same_value_on_one_two_and_three_ranks(cell, size):
    """37 samples are uneven shares; of 2, one of three ranks has none."""
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    chosen = (*IMAGES, f"data.val_size={size}", *EVALUATION, F1, CORRECT)
    (alone,) = cell.run(0, *chosen, tiny=TINY, limit=180)
    (expected,) = alone.evaluated
    assert expected["mine/total"] == size
    # The first import of torchmetrics takes each process seconds, on a busy machine many.
    for record in cell.run(3, *chosen, "parallel=ddp", tiny=TINY, limit=180):
        assert record.error is None
        (metrics,) = record.evaluated
        assert (metrics["mine/right"], metrics["mine/total"]) == (expected["mine/right"], size)
        assert metrics["f1"] == pytest.approx(expected["f1"], abs=1e-7)


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_after_an_error_on_one_rank(cell, spread):
    """An evaluation that runs out of memory on rank 1: each sample counts once, on all ranks or none."""
    chosen = (*GPT, *EVALUATION, CORRECT, f"parallel={spread}")
    wanted = cell.run(2, *chosen, tiny=TINY)
    records = cell.run(2, *chosen, tiny=TINY, faults=[Fault("evaluate", 1, 150, rank=1)])
    for record, other in zip(records, wanted, strict=True):
        assert record.error is None
        assert record.evaluated[0]["mine/total"] == 37
        assert record.evaluated[0]["mine/right"] == other.evaluated[0]["mine/right"]
    assert records[1].failures


def test_a_metric_that_cannot_be_merged_is_refused(cell):
    chosen = (*IMAGES, "data.val_size=8", *EVALUATION, "+metrics.mine={_target_: own_hooks.Unmergeable}")
    for record in cell.run(2, *chosen, "parallel=ddp", tiny=TINY):
        assert record.error.startswith("metrics.mine: each of several ranks has a part of the samples")


def test_a_stop_that_one_rank_asks_for_is_that_of_all(cell):
    chosen = (*IMAGES, "parallel=ddp", "user_packages=[own_hooks]", "train.max_steps=6")
    records = cell.run(2, *chosen, callback("StopsAt", step=3, rank=1), tiny=TINY)
    assert [record.progress["step"] for record in records] == [3, 3]
    assert [record.progress["stopped"] for record in records] == ["callbacks.mine: step 3"] * 2


def test_an_error_in_a_callback_ends_all_ranks(cell):
    chosen = (*IMAGES, "parallel=ddp", "user_packages=[own_hooks]", callback("Fails"))
    for record in cell.run(2, *chosen, tiny=TINY):
        assert "no such plot" in record.error
