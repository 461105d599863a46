import numpy as np
import pytest

from trainapp.data.counter_rng import GAMMA, splitmix64, uniform


def test_splitmix64_gives_the_published_outputs_for_state_0():
    states = np.array([1, 2, 3], dtype=np.uint64) * np.uint64(GAMMA)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(states).tolist() == expected
    assert states[0] == GAMMA  # the argument is unchanged


def test_uniform_in_mean_variance_and_histogram():
    draws = uniform(seed=3, epoch=5, indices=range(10_000), count=20)
    assert draws.shape == (10_000, 20)
    assert draws.dtype == np.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.003  # the standard error is 0.0006
    assert abs(draws.var() - 1 / 12) < 0.002
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi_squared < 160  # 99 degrees of freedom: 2 in 10,000 lie outside


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbouring_draws_are_uncorrelated(axis):
    draws = uniform(seed=0, epoch=0, indices=range(2_000), count=50) - 0.5
    here, there = np.delete(draws, -1, axis), np.delete(draws, 0, axis)
    assert abs((here * there).mean() * 12) < 0.02  # the standard error is 0.003


def test_a_row_does_not_depend_on_the_batch_or_on_the_count():
    whole = uniform(1, 2, range(100), 7)
    for batch in ([42], [99, 0, 42, 42], list(range(40, 50))):
        np.testing.assert_array_equal(uniform(1, 2, batch, 7), whole[batch])
    np.testing.assert_array_equal(uniform(1, 2, range(100), 3), whole[:, :3])


def test_seed_epoch_and_index_all_matter_and_are_not_interchangeable():
    seen = {
        uniform(seed, epoch, [index], 1).item() for seed in range(10) for epoch in range(10) for index in range(100)
    }
    assert len(seen) == 10 * 10 * 100


def test_no_integer_is_too_large():
    with np.errstate(all="raise"):
        draws = uniform(2**64 - 1, 2**40, [0, 2**62], 2)
    assert len(np.unique(draws)) == 4
    assert uniform(0, 0, [], 3).shape == (0, 3)
