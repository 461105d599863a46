"""Stateless random numbers and permutations: a value depends on where it is used, not on earlier draws.

So an augmentation drawn from (seed, epoch, sample index) is the same in whatever batch, worker or retry the sample
turns up. Method: the splitmix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014), whose n-th output is a hash of `state + n * GAMMA`: no earlier one is needed.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trainapp.draws.splitmix64 import FACTORS, GAMMA

_WORD = 2**64
_ROUNDS = 8  # of the Feistel network
_ORDER_SALT = 0x6F72646572  # the order of an epoch shares no random numbers with augmentation, which has the same seed


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Apply the output function of splitmix64: a bijective hash of uint64 values, elementwise; `state` is unchanged."""
    z = state ^ (state >> np.uint64(30))
    z *= np.uint64(FACTORS[0])
    z ^= z >> np.uint64(27)
    z *= np.uint64(FACTORS[1])
    z ^= z >> np.uint64(31)
    return z


@lru_cache(maxsize=64)
def key(seed: int, epoch: int) -> np.uint64:
    """Return a hash of seed and epoch, any integers, taken modulo 2**64."""
    hashed_seed = splitmix64(np.array([(seed + GAMMA) % _WORD], dtype=np.uint64))
    epoch_offset = np.uint64((epoch + 1) * GAMMA % _WORD)
    return splitmix64(hashed_seed + epoch_offset)[0]


def uniform(seed: int, epoch: int, indices: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Return random numbers in [0, 1): float64 [len(indices), count], row i a function of (seed, epoch, indices[i]).

    A larger `count` appends columns and leaves the first ones unchanged. seed and epoch may be any integers,
    taken modulo 2**64.
    """
    gamma = np.uint64(GAMMA)
    # Each row is a generator of its own, which starts from a hash of the row's index.
    row_numbers = np.asarray(indices, dtype=np.int64).astype(np.uint64) + np.uint64(1)
    row_states = splitmix64(row_numbers * gamma + key(seed, epoch))
    # The columns are the generator's outputs.
    column_numbers = np.arange(1, count + 1, dtype=np.uint64)
    bits = splitmix64(row_states[:, None] + column_numbers * gamma)
    # The upper 53 bits, as many as a float64 holds.
    upper_bits = bits >> np.uint64(11)
    return upper_bits * 2.0**-53


def permuted(seed: int, epoch: int, positions: np.ndarray, samples: int) -> np.ndarray:
    """Return the image of these positions under a permutation of range(samples): int64 [N] -> int64 [N].

    A Feistel network on the cells of a rectangle with at least `samples` cells: row and column are alternately shifted
    by a hash of the other, which is invertible for any hash. A position that leaves range(samples) continues along its
    cycle until it returns; this is rare, as the rectangle has less than one extra row. Source: J. Black, P. Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002 (generalised Feistel, cycle walking); the hash is splitmix64.
    """
    # The smallest rectangle, nearly a square, that holds all samples.
    columns = math.isqrt(samples - 1) + 1
    rows = -(-samples // columns)  # rounded up

    # A key per round, so that each shifts by another hash.
    round_numbers = np.arange(1, _ROUNDS + 1, dtype=np.uint64)
    round_keys = splitmix64(round_numbers * np.uint64(GAMMA) + key(seed + _ORDER_SALT, epoch))

    # Cells beyond the data walk on along their cycles.
    images = _permute_cells(positions, rows, columns, round_keys)
    outside = np.flatnonzero(images >= samples)
    while len(outside):
        images[outside] = _permute_cells(images[outside], rows, columns, round_keys)
        outside = outside[images[outside] >= samples]
    return images


def _permute_cells(cells: np.ndarray, rows: int, columns: int, round_keys: np.ndarray) -> np.ndarray:
    """Return the network's image of the cells: a permutation of range(rows * columns)."""
    row_count = np.uint64(rows)
    column_count = np.uint64(columns)
    gamma = np.uint64(GAMMA)
    row, column = np.divmod(cells.astype(np.uint64), column_count)
    for row_key, column_key in round_keys.reshape(-1, 2):
        # Shift the row by a hash of the column, then the column by a hash of the new row.
        row_shift = splitmix64(column * gamma + row_key) % row_count
        row = (row + row_shift) % row_count
        column_shift = splitmix64(row * gamma + column_key) % column_count
        column = (column + column_shift) % column_count
    return (row * column_count + column).astype(np.int64)
