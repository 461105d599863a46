"""Stateless random numbers, and the order of an epoch: a permutation, the same on every rank, that needs no memory."""

import time
import tracemalloc

import numpy as np
import pytest

from trainapp.data.sampler import BLOCK, Permutation
from trainapp.data.stateless_random import GAMMA, permuted, splitmix64, uniform


def test_splitmix64_gives_the_published_outputs_for_state_0():
    states = np.array([1, 2, 3], dtype=np.uint64) * np.uint64(GAMMA)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(states).tolist() == expected
    assert states[0] == GAMMA  # the argument is unchanged


def test_draws_are_uniform_and_neighbours_uncorrelated():
    draws = uniform(seed=3, epoch=5, indices=range(10_000), count=20)
    assert 0 <= draws.min() <= draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert 50 < ((counts - 2000) ** 2 / 2000).sum() < 160  # 99 degrees of freedom: 2 in 10,000 lie outside
    for axis in (0, 1):
        here, there = np.delete(draws - 0.5, -1, axis), np.delete(draws - 0.5, 0, axis)
        assert abs((here * there).mean() * 12) < 0.02  # the standard error is 0.002


def test_a_row_depends_on_seed_epoch_and_index_alone():
    whole = uniform(1, 2, range(100), 7)
    for batch in ([42], [99, 0, 42, 42], list(range(40, 50))):
        np.testing.assert_array_equal(uniform(1, 2, batch, 3), whole[batch, :3])
    seen = {uniform(seed, epoch, [index], 1).item() for seed in range(10) for epoch in range(10) for index in range(9)}
    assert len(seen) == 10 * 10 * 9
    with np.errstate(all="raise"):  # no integer is too large
        assert len(np.unique(uniform(2**64 - 1, 2**40, [0, 2**62], 2))) == 4


SIZES = [*range(1, 70), 127, 128, 129, 256, 997, 1024, 7919, 65536, 65537]


def test_a_keyed_order_is_a_permutation():
    for samples in SIZES:
        for seed, epoch in ((0, 0), (0, 1), (2**62, 5)):
            assert sorted(permuted(seed, epoch, np.arange(samples), samples).tolist()) == list(range(samples))


def test_the_order_of_today_is_that_of_earlier_checkpoints():
    assert Permutation(3, 1000).indices(2, 500, 508) == [14, 461, 239, 541, 711, 672, 497, 902]


def test_every_order_of_four_is_equally_likely():
    """Chi-square with 23 degrees of freedom: 49.7 is passed by one honest shuffle in a thousand."""
    seen = [permuted(seed, 0, np.arange(4), 4) @ [64, 16, 4, 1] for seed in range(4800)]
    _, counts = np.unique(seen, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 49.7


def _is_random(values, samples):
    """By the chi-square of where positions go in 16 bins, and by the correlation of neighbours: 37.7 and 0.033 are
    passed by one honest shuffle in a thousand.
    """
    scaled = values / samples
    counts, expected = np.bincount((scaled * 16).astype(int), minlength=16), len(values) / 16
    spread, correlation = ((counts - expected) ** 2 / expected).sum(), np.corrcoef(scaled[:-1], scaled[1:])[0, 1]
    return spread < 37.7 and abs(correlation) < 0.033


@pytest.mark.parametrize("samples", [2**20 + 7, 10**9, 2**31 + 11])
def test_it_is_uniform_and_neighbours_are_independent(samples):
    for start in (0, 500_000):
        assert _is_random(permuted(1, 0, np.arange(start, start + 10_000), samples), samples)
    assert not _is_random(np.arange(10_000) * 7919 % samples, samples)  # negative control: a stride through the data


def test_any_slice_is_that_of_the_whole():
    samples = 2 * BLOCK + 5
    order, whole = Permutation(3, samples), Permutation(3, samples).indices(1, 0, samples)
    assert sorted(whole) == list(range(samples))
    for start, end in ((0, 10), (BLOCK - 3, BLOCK + 3), (5, 2 * BLOCK + 5), (2 * BLOCK, 2 * BLOCK + 5), (7, 7)):
        assert order.indices(1, start, end) == whole[start:end]
    assert order.indices(0, 0, 20) != whole[:20]


def test_a_billion_samples_cost_neither_time_nor_memory():
    tracemalloc.start()
    started = time.monotonic()
    order = Permutation(0, 10**9)
    found = {index for start in range(0, 10**9, 10**8) for index in order.indices(7, start, start + 64)}
    seconds, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 640
    assert peak < 8 * 2**20
    assert seconds < 5
