"""Stateless random numbers and permutations: a value depends on where it is used, not on earlier draws.

So an augmentation drawn from (seed, epoch, sample index) is the same in whatever batch, worker or retry the sample
turns up. Method: the splitmix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014), whose n-th output is a hash of `state + n * GAMMA`: no earlier one is needed.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trainapp.rng import FACTORS, GAMMA

_WORD = 2**64
_ROUNDS = 8
_ORDER_SALT = 0x6F72646572  # the order of an epoch shares no random numbers with augmentation, which has the same seed


def splitmix64(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: a bijective hash of uint64 values, elementwise; `state` is unchanged."""
    z = state ^ (state >> np.uint64(30))
    z *= np.uint64(FACTORS[0])
    z ^= z >> np.uint64(27)
    z *= np.uint64(FACTORS[1])
    z ^= z >> np.uint64(31)
    return z


@lru_cache(maxsize=64)
def key(seed: int, epoch: int) -> np.uint64:
    """A hash of seed and epoch, any integers, taken modulo 2**64."""
    hashed = splitmix64(np.array([(seed + GAMMA) % _WORD], dtype=np.uint64))
    return splitmix64(hashed + np.uint64((epoch + 1) * GAMMA % _WORD))[0]


def uniform(seed: int, epoch: int, indices: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Random numbers in [0, 1): float64 [len(indices), count], row i a function of (seed, epoch, indices[i]).

    A larger `count` appends columns and leaves the first ones unchanged. seed and epoch may be any integers,
    taken modulo 2**64.
    """
    index = np.asarray(indices, dtype=np.int64).astype(np.uint64)
    streams = splitmix64((index + np.uint64(1)) * np.uint64(GAMMA) + key(seed, epoch))
    bits = splitmix64(streams[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA))
    return (bits >> np.uint64(11)) * 2.0**-53


def permuted(seed: int, epoch: int, positions: np.ndarray, samples: int) -> np.ndarray:
    """The image of these positions under a permutation of range(samples): int64 [N] -> int64 [N].

    A Feistel network on the cells of a rectangle with at least `samples` cells: row and column are alternately shifted
    by a hash of the other, which is invertible for any hash. A position that leaves range(samples) continues along its
    cycle until it returns; this is rare, as the rectangle has less than one extra row. Source: J. Black, P. Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002 (generalised Feistel, cycle walking); the hash is splitmix64.
    """
    columns = math.isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    keys = splitmix64(np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(GAMMA) + key(seed + _ORDER_SALT, epoch))
    found = _shifted(positions, rows, columns, keys)
    outside = np.flatnonzero(found >= samples)
    while len(outside):
        found[outside] = _shifted(found[outside], rows, columns, keys)
        outside = outside[found[outside] >= samples]
    return found


def _shifted(cells: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    """The network itself, a permutation of range(rows * columns)."""
    row, column = np.divmod(cells.astype(np.uint64), np.uint64(columns))
    for of_row, of_column in keys.reshape(-1, 2):
        row = (row + splitmix64(column * np.uint64(GAMMA) + of_row) % np.uint64(rows)) % np.uint64(rows)
        column = (column + splitmix64(row * np.uint64(GAMMA) + of_column) % np.uint64(columns)) % np.uint64(columns)
    return (row * np.uint64(columns) + column).astype(np.int64)
