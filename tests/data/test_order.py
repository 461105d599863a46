"""The order of an epoch: a permutation, the same on every rank, that needs no memory."""

import time
import tracemalloc

import numpy as np
import pytest

from trainapp.data.counter_rng import permuted
from trainapp.data.sampler import BLOCK, Permutation

SIZES = [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 997, 1023, 1024, 1025, 7919, 65535, 65536, 65537]


@pytest.mark.parametrize("samples", SIZES)
def test_a_keyed_order_is_a_permutation(samples):
    for seed, epoch in ((0, 0), (0, 1), (2**62, 5)):
        assert sorted(permuted(seed, epoch, np.arange(samples), samples).tolist()) == list(range(samples))


def test_every_order_of_four_is_equally_likely():
    """Chi-square with 23 degrees of freedom: 49.7 is passed by one honest shuffle in a thousand."""
    seen = [permuted(seed, 0, np.arange(4), 4) @ [64, 16, 4, 1] for seed in range(4800)]
    _, counts = np.unique(seen, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 49.7


def _statistics(values, samples):
    """Chi-square of where positions go in 16 bins, and the correlation of neighbours."""
    scaled = values / samples
    counts = np.bincount((scaled * 16).astype(int), minlength=16)
    expected = len(values) / 16
    return ((counts - expected) ** 2 / expected).sum(), abs(np.corrcoef(scaled[:-1], scaled[1:])[0, 1])


@pytest.mark.parametrize("samples", [2**20 + 7, 10**9, 2**31 + 11])
@pytest.mark.parametrize("start", [0, 500_000])
def test_it_is_uniform_and_neighbours_are_independent(samples, start):
    """37.7 and 0.033 are passed by one honest shuffle in a thousand."""
    spread, correlation = _statistics(permuted(1, 0, np.arange(start, start + 10_000), samples), samples)
    assert spread < 37.7
    assert correlation < 0.033


def test_these_statistics_see_a_bad_order():
    """Negative control: a stride through the data."""
    spread, correlation = _statistics(np.arange(10_000) * 7919 % 10**6, 10**6)
    assert spread > 37.7 or correlation > 0.033


def test_any_slice_is_that_of_the_whole():
    samples = 2 * BLOCK + 5
    order, whole = Permutation(3, samples), Permutation(3, samples).indices(1, 0, samples)
    assert sorted(whole) == list(range(samples))
    for start, end in ((0, 10), (BLOCK - 3, BLOCK + 3), (5, 2 * BLOCK + 5), (2 * BLOCK, 2 * BLOCK + 5), (7, 7)):
        assert order.indices(1, start, end) == whole[start:end]
    assert order.indices(0, 0, 20) != whole[:20]
    assert order.indices(1, 0, 20) == whole[:20]


def test_a_billion_samples_cost_neither_time_nor_memory():
    tracemalloc.start()
    started = time.monotonic()
    order = Permutation(0, 10**9)
    found = {index for start in range(0, 10**9, 10**8) for index in order.indices(7, start, start + 64)}
    seconds, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 640
    assert 0 <= min(found) < 10**8
    assert 9 * 10**8 < max(found) < 10**9
    assert peak < 8 * 2**20
    assert seconds < 5
