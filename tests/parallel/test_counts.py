"""Counts and metrics that differ between ranks: as in one process, and no rank waits for another in vain."""

import helpers
import pytest
import weighted

from .cell import TINY, Cell
from .comparing import TOLERANCE, assert_same, error
from .rank import Record

pytestmark = pytest.mark.slow

LIMIT = 30.0  # seconds: a rank that waits for a collective that the others do not call would exceed it
OVERRIDES = (
    *weighted.OVERRIDES,
    "+data.scale=0.001",
    "train.max_steps=4",
    "every.eval=2",
    "train.ema=null",
)


def both(cell: Cell, *overrides: str) -> tuple[Record, list[Record]]:
    """Return the record of one process, and those of two ranks."""
    (alone,) = cell.reference(0, *overrides, tiny=(*TINY, *OVERRIDES))
    records = cell.run(2, "parallel=ddp", *overrides, tiny=(*TINY, *OVERRIDES), limit=LIMIT)
    return alone, records


@pytest.mark.parametrize("task", ["task", "as_numbers"])
def test_fractions(cell, task):
    alone, records = both(cell, f"task=weighted.{task}")
    assert_same(records, alone)
    for record in records:
        losses = [metrics["loss"] for metrics in record.evaluated]
        assert losses == pytest.approx([metrics["loss"] for metrics in alone.evaluated], rel=1e-5)
        assert record.evaluated == records[0].evaluated


@pytest.mark.parametrize("ranks", ["both ranks", "one rank"])
def test_nothing_counts(cell, ranks):
    """In a step of both ranks there is no update; on one rank, the other's samples decide."""
    (first,) = cell.reference(0, "task=weighted.task", tiny=(*TINY, *OVERRIDES))
    silent = first.samples[1] if ranks == "both ranks" else first.samples[1][8:]
    alone, records = both(cell, "task=weighted.task", f"+data.silent={silent}")
    skipped = int(ranks == "both ranks")
    assert alone.progress["skipped"] == skipped
    for record in records:
        assert record.error is None
        assert (record.progress["skipped"], record.progress["samples"]) == (skipped, 16 * (4 + skipped))
        assert error(record.weights, alone.weights) < TOLERANCE
        assert record.weights.equal(records[0].weights)
    assert error(first.weights, alone.weights) > 1e-3  # the silent samples would have made a difference


def test_metrics_of_one_rank(cell):
    """Every rank has a metric that no other has, in the log and in evaluation."""
    _, records = both(cell, "task=weighted.on_one_rank")
    for record in records:
        assert record.error is None
        assert all(metrics.keys() == {"loss", "accuracy", "one_1", "two_1"} for metrics in record.evaluated)
        assert [metrics["two_1"] for metrics in record.evaluated] == pytest.approx([2.0, 2.0])
        assert record.evaluated == records[0].evaluated
    lines = helpers.metrics(cell.folder / f"run_{cell.number}")
    assert [line["two_1"] for line in lines] == pytest.approx([2.0] * 4)


def test_metrics_of_some_batches(cell):
    """The share of class 3 among the micro-batches that have it: their cut is the same on one rank and on two."""
    alone, records = both(cell, "task=weighted.task", "batch.eval_micro_size=8")
    for record in records:
        assert record.evaluated[0].keys() == alone.evaluated[0].keys() == {"loss", "accuracy", "third"}
        for metrics, expected in zip(record.evaluated, alone.evaluated, strict=True):
            assert metrics["third"] == pytest.approx(expected["third"], rel=1e-5)
