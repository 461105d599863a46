"""How samples are cut into micro-batches."""

import pytest

from trainapp.data.batch import cut, cut_evenly


@pytest.mark.parametrize(
    ("samples", "size", "sizes"),
    [
        (10, 3, [3, 3, 2, 2]),
        (10, 4, [4, 4, 2]),
        (10, 10, [10]),
        (10, 16, [10]),
        (9, 8, [7, 2]),
        (3, 2, [2, 1]),
        (1, 4, [1]),
        (5, 1, [1] * 5),
    ],
)
def test_cut_takes_the_size_and_leaves_no_single_sample(samples, size, sizes):
    assert [len(part) for part in cut(list(range(samples)), size)] == sizes


def test_nothing_is_cut_into_nothing():
    """The remainder of an evaluation that ran out of memory after its last batch."""
    assert cut([], 4) == cut_evenly([], 4) == []


def test_cut_keeps_every_sample_in_order():
    for samples in range(1, 40):
        for size in range(1, 45):
            parts = cut(list(range(samples)), size)
            assert [i for part in parts for i in part] == list(range(samples))
            assert len(parts) == -(-samples // size)
            assert size <= 2 or samples == 1 or min(map(len, parts)) >= 2
            assert max(map(len, parts)) <= size


def test_cut_evenly_10_in_3_is_4_3_3():
    assert [len(part) for part in cut_evenly(list(range(10)), 3)] == [4, 3, 3]
    assert [len(part) for part in cut_evenly([7, 8], 3)] == [1, 1]  # no empty micro-batch
    for samples in range(1, 30):
        for parts in range(1, 30):
            pieces = cut_evenly(list(range(samples)), parts)
            assert [i for piece in pieces for i in piece] == list(range(samples))
            assert len(pieces) == min(parts, samples)
            assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
