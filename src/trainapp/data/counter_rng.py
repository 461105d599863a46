"""Stateless random numbers: a value is a function of where it is used, not of what was drawn before it.

An augmentation drawn from (seed, epoch, sample index) is the same one in whatever batch, worker or retry the
sample turns up. Method: the splitmix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose n-th output is a hash of `state + n * GAMMA`: no earlier one is needed.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

GAMMA = 0x9E3779B97F4A7C15
_WORD = 2**64


def splitmix64(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: a bijective hash of uint64 values, elementwise; `state` is unchanged."""
    z = state ^ (state >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


@lru_cache(maxsize=64)
def key(seed: int, epoch: int) -> np.uint64:
    """A hash of the two, which may be any integers, taken modulo 2**64."""
    hashed = splitmix64(np.array([(seed + GAMMA) % _WORD], dtype=np.uint64))
    return splitmix64(hashed + np.uint64((epoch + 1) * GAMMA % _WORD))[0]


@lru_cache(maxsize=64)
def _steps(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)


def uniform(seed: int, epoch: int, indices: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Random numbers in [0, 1): float64 [len(indices), count], row i a function of (seed, epoch, indices[i]).

    A larger `count` appends columns and leaves the first ones unchanged. seed and epoch may be any integers,
    taken modulo 2**64.
    """
    index = np.asarray(indices, dtype=np.int64).astype(np.uint64)
    streams = splitmix64((index + np.uint64(1)) * np.uint64(GAMMA) + key(seed, epoch))
    bits = splitmix64(streams[:, None] + _steps(count))
    return (bits >> np.uint64(11)) * 2.0**-53
