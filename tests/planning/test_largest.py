"""The search for the largest micro-batch: right, within six traces, wherever the slopes change."""

import random

import pytest

from trainapp.planning.largest import HALVED, MOST_TRACES, largest_that_fits


def counted(peak_of):
    calls = []

    def counting(size):
        calls.append(size)
        return peak_of(size)

    return counting, calls


def pieces(rng: random.Random, top: int):
    """A peak that is the highest of up to three affine functions of the size."""
    lines = [(rng.randint(1_000, 1_000_000), rng.randint(100, 100_000)) for _ in range(rng.randint(1, 3))]
    return lambda size: max(fixed + slope * size for fixed, slope in lines)


@pytest.mark.parametrize("seed", range(200))
def test_the_size_found_fits_and_the_next_does_not(seed):
    rng = random.Random(seed)
    top = rng.choice([1, 2, 7, 64, 1000, 5000])
    peak_of = pieces(rng, top)
    limit = rng.randint(peak_of(1) - 1000, peak_of(top) + 1000)
    counting, calls = counted(peak_of)
    found = largest_that_fits(counting, limit, top)
    assert len(calls) == len(set(calls)) <= MOST_TRACES
    assert 0 <= found <= top
    assert found == 0 or peak_of(found) <= limit
    assert found == top or peak_of(found + 1) > limit


@pytest.mark.parametrize("bound", [7, 40, 331, 505])
def test_where_the_peak_says_nothing_but_whether_a_size_fits(bound):
    """As of an allocator that reserves up to its limit whatever the size: secants move by one."""
    counting, calls = counted(lambda size: 1000 if size <= bound else 1001)
    found = largest_that_fits(counting, 1000, 512)
    assert bound - 128 <= found <= bound  # 512 halved twice
    assert len(calls) <= HALVED


def test_a_dip_where_accumulation_ends_is_found_first():
    """All samples at once need no room for earlier gradients: they may fit where fewer do not."""
    assert largest_that_fits(lambda size: 900 if size == 64 else 500 + 10 * size, 900, 64) == 64


def test_the_first_pieces_slope_alone_would_mislead():
    def peak_of(size):
        return max(1_000_000, 10_000 * size)

    counting, calls = counted(peak_of)
    assert largest_that_fits(counting, 1_500_000, 1000) == 150
    assert len(calls) == MOST_TRACES + 1  # the last one is for 151: without it, anything up to 380 might fit


def test_sizes_that_are_known_are_not_traced_again():
    counting, calls = counted(lambda size: 100 * size)
    known = {10: 1000, 64: 6400}
    assert largest_that_fits(counting, 1500, 64, known=known) == 15
    assert not {10, 64} & set(calls)


def test_nothing_fits():
    counting, calls = counted(lambda size: 100 * size)
    assert largest_that_fits(counting, 99, 64) == 0
    assert calls == [64, 1]


def test_a_model_that_cannot_train_on_single_samples():
    counting, calls = counted(lambda size: 100 * size)
    assert largest_that_fits(counting, 350, 64, smallest=2) == 3
    assert min(calls) == 2
