"""Stateless random numbers and permutations: a value is a function of where it is used,
not of what was drawn before it.

An augmentation drawn from (seed, epoch, sample index) is the same one in whatever batch, worker or retry the
sample turns up. Method: the splitmix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose n-th output is a hash of `state + n * GAMMA`: no earlier one is needed.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

GAMMA = 0x9E3779B97F4A7C15
_WORD = 2**64
_ROUNDS = 8
_ORDER_SALT = 0x6F72646572  # the order of an epoch shares no random numbers with augmentation, which has the same seed


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


def permuted(seed: int, epoch: int, positions: np.ndarray, samples: int) -> np.ndarray:
    """Where a permutation of range(samples) takes these positions: int64 [N] -> int64 [N]. Its tables take 64 bytes per
    row, 2 MB for 10^9 samples.

    A Feistel network on the cells of a rectangle with at least `samples` cells: row and column are in turn shifted by a
    hash of the other, which is invertible whatever the hash. A position that leaves range(samples) walks on along its
    cycle until it is back; the rectangle has fewer than one row too many, so that few do. Source: J. Black, P. Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002 (generalised Feistel, cycle walking); the hash is splitmix64.
    """
    columns = math.isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    shifts = _shifts(seed, epoch, rows, columns)
    found = _shifted(positions, rows, columns, shifts)
    outside = np.flatnonzero(found >= samples)
    while len(outside):
        found[outside] = _shifted(found[outside], rows, columns, shifts)
        outside = outside[found[outside] >= samples]
    return found


def _shifted(cells: np.ndarray, rows: int, columns: int, shifts: Sequence[np.ndarray]) -> np.ndarray:
    """The network itself, a permutation of range(rows * columns)."""
    row, column = np.divmod(cells, columns)
    for of_row, of_column in zip(shifts[::2], shifts[1::2], strict=True):
        row += of_row[column]
        row %= rows
        column += of_column[row]
        column %= columns
    row *= columns
    row += column
    return row


@lru_cache(maxsize=4)
def _shifts(seed: int, epoch: int, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """Of each round, by how much each column shifts a row, or each row a column: a table, since hashes take longer."""
    counters = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(GAMMA)
    keys = splitmix64(counters + key(seed + _ORDER_SALT, epoch))
    hashed = splitmix64(np.arange(max(rows, columns), dtype=np.uint64) * np.uint64(GAMMA) + keys[:, None])
    sizes = [(columns, rows), (rows, columns)] * (_ROUNDS // 2)
    return tuple(
        (hashes[:inputs] % np.uint64(outputs)).astype(np.int64)
        for hashes, (inputs, outputs) in zip(hashed, sizes, strict=True)
    )
