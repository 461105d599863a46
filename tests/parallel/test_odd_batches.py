"""Batches that are not cut by rows, on ranks that must cut theirs into equally many pieces: as in one process."""

import odd_batches
import pytest
import torch

from trainapp.data.progress import Progress
from trainapp.data.source import TrainBatches
from trainapp.parallel.ranks import SingleRank

from .conftest import TINY
from .test_equality import assert_same, nightly

OVERRIDES = (
    *odd_batches.OVERRIDES,
    "every.eval=2",
    "batch.eval_micro_size=5",
    "batch.global_size=15",
)
SIZES = {1: {1: 8, 8: 8, 16: 4, 32: 4, 64: 1}}  # by shape: long texts one by one


class SecondOfTwo(SingleRank):
    rank, world = 1, 2


def samples_of_the_second_rank() -> list[int]:
    """In the first step: 8, and the first rank has 7, of short texts."""
    cpu = torch.device("cpu")
    one = TrainBatches(odd_batches.Texts("train"), global_size=15, seed=0, device=cpu, ranks=SecondOfTwo())
    return one.indices(Progress())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind in ("packed", "nested") else nightly(kind) for kind in odd_batches.KINDS if kind != "strings"]
)
def test_as_one_process(cell, kind):
    """One rank cuts 8 long texts into 8 pieces, the other its 7 short ones into 7, and adds a dummy."""
    overrides = (*OVERRIDES, f"+data.kind={kind}", f"+data.long={samples_of_the_second_rank()}")
    (alone,) = cell.run(0, *overrides, tiny=TINY)
    records = cell.run(2, "parallel=ddp", *overrides, tiny=TINY, schedule=SIZES)
    assert_same(records, alone)
    for record in records:
        for found, wanted in zip(record.evaluated, alone.evaluated, strict=True):
            assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-9)
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
