"""Random numbers that belong to samples are distributed as torch's, and independent of each other."""

import math

import pytest
import torch

from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws


def ks(values, cdf):
    """Kolmogorov and Smirnov's statistic times sqrt(n); above 1.95 with a probability of 0.001."""
    ordered = cdf(values.double().flatten().sort().values)
    steps = torch.arange(ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    return max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()).item() * math.sqrt(ordered.numel())


def correlation(first, second):
    """In standard deviations."""
    both = torch.stack([first.double().flatten(), second.double().flatten()])
    return abs(torch.corrcoef(both)[0, 1].item()) * math.sqrt(both.shape[1])


def sampled(draw, samples=64, step=1, key=None):
    with SampleDraws(key or (7, step), range(samples), DrawRecord(), "train"):
        return draw(samples), draw(samples)


CONTINUOUS = {
    "uniform": (lambda n, d: torch.rand(n, 5000, dtype=d), lambda v: v),
    "normal": (lambda n, d: torch.randn(n, 5000, dtype=d), torch.special.ndtr),
    "exponential": (lambda n, d: torch.empty(n, 5000, dtype=d).exponential_(), lambda v: -torch.expm1(-v)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_distributions_are_torchs(name, dtype):
    draw, cdf = CONTINUOUS[name]
    first, second = sampled(lambda n: draw(n, dtype))
    other = sampled(lambda n: draw(n, dtype), step=2)[0]
    assert ks(first, cdf) < 2
    assert ks(first[:, 0], cdf) < 2  # over samples
    assert ks(first[0], cdf) < 2  # within one
    pairs = {
        "draws": (first, second),
        "steps": (first, other),
        "samples": (first[:-1], first[1:]),
        "elements": (first[:, :-1], first[:, 1:]),
        "halves": (first[:, :2500], first[:, 2500:]),  # which Box and Muller pair
    }
    assert {pair: correlation(*of) for pair, of in pairs.items() if correlation(*of) > 4} == {}
    # The same measures find numbers of another distribution, and numbers that repeat.
    assert ks(first + 0.05, cdf) > 4
    assert correlation(first, sampled(lambda n: draw(n, dtype))[0]) > 100


def test_complex_numbers_are_torchs():
    """Uniform ones have both parts in the range; other distributions have none, and raise torch's error."""
    parts = torch.view_as_real(sampled(lambda n: torch.rand(n, 500, dtype=torch.complex64))[0])
    assert ks(parts[..., 0], lambda v: v) < 2
    assert ks(parts[..., 1], lambda v: v) < 2
    assert correlation(parts[..., 0], parts[..., 1]) < 4
    parts = torch.view_as_real(sampled(lambda n: torch.empty(n, 500, dtype=torch.complex64).uniform_(-3, -1))[0])
    assert ks((parts + 3) / 2, lambda v: v) < 2
    parts = torch.view_as_real(sampled(lambda n: torch.randn(n, 500, dtype=torch.complex64))[0])
    assert ks(parts * math.sqrt(2), torch.special.ndtr) < 2
    with pytest.raises(RuntimeError, match="dtype must be a floating point"):
        sampled(lambda n: torch.empty(n, 5, dtype=torch.complex64).exponential_())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.001])
def test_probabilities(p):
    mask = sampled(lambda n: torch.empty(n, 20000).bernoulli_(p))[0]
    assert abs(mask.mean().item() - p) < 4 * math.sqrt(p * (1 - p) / mask.numel()) + 2**-17


def test_frequencies():
    """Chi squared exceeds 27.9 (9 degrees of freedom) and 16.3 (3) with a probability of 0.001."""
    counts = sampled(lambda n: torch.randint(0, 10, (n,)), 20000)[0].bincount(minlength=10)
    assert ((counts - 2000).square() / 2000).sum() < 27.9
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4]) * 2000
    counts = sampled(lambda n: torch.multinomial(expected.expand(n, 4), 1), 2000)[0].flatten().bincount(minlength=4)
    assert ((counts - expected).square() / expected).sum() < 16.3
