"""The order of an epoch: which sample stands at which position. A pure function of (seed, epoch).

Up to `SHUFFLED_UP_TO` samples it is a shuffled array. Beyond that, the array would take 8 bytes per sample and seconds
to shuffle, so the sample at a position is computed where it is needed: a keyed permutation, in constant memory.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from trainapp.data.counter_rng import GAMMA, key, splitmix64

SHUFFLED_UP_TO = 2**20
ROUNDS = 8
BLOCK = 8192  # positions computed at a time: a step alone would take 0.2 ms, of which its share of a block is 0.01
_SALT = 0x6F72646572  # the order of an epoch shares no random numbers with augmentation, which has the same seed


class Order(Protocol):
    """Which samples an epoch consists of, by position. name: goes into checkpoints, whose epoch it continues."""

    name: str

    def indices(self, epoch: int, start: int, end: int) -> Sequence[int]:
        """The samples at the positions [start, end) of an epoch."""
        ...


class Draw(int):
    """The index of a sample that may come more than once in an epoch, with the position that it is drawn for."""

    position: int

    def __new__(cls, index: int, position: int) -> "Draw":
        draw = super().__new__(cls, index)
        draw.position = position
        return draw

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.position


class Shuffled:
    """A permutation of range(samples) by torch's generator. Holds one epoch's, 8 bytes per sample."""

    name = "shuffled"

    def __init__(self, seed: int, samples: int):
        self.seed, self.samples = seed, samples
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def indices(self, epoch: int, start: int, end: int) -> list[int]:
        """See `Order`."""
        if self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(self.samples, generator=generator)
            self._epoch = (epoch, order.numpy().copy())  # a tensor that stays would count as memory of the steps
        return self._epoch[1][start:end].tolist()


class Keyed:
    """The keyed permutation of `permuted`. Holds one block of positions, whatever the number of samples."""

    name = "keyed"

    def __init__(self, seed: int, samples: int):
        self.seed, self.samples = seed, samples
        self._block: tuple[int, int, np.ndarray] = (-1, -1, np.empty(0, dtype=np.int64))

    def indices(self, epoch: int, start: int, end: int) -> list[int]:
        """See `Order`."""
        found: list[int] = []
        while start < end:
            number = start // BLOCK
            stop = min(end, (number + 1) * BLOCK)
            found += self._positions(epoch, number)[start % BLOCK : stop - number * BLOCK].tolist()
            start = stop
        return found

    def _positions(self, epoch: int, number: int) -> np.ndarray:
        if self._block[:2] != (epoch, number):
            positions = np.arange(number * BLOCK, min((number + 1) * BLOCK, self.samples))
            self._block = (epoch, number, permuted(self.seed, epoch, positions, self.samples))
        return self._block[2]


ORDERS: dict[str, type[Shuffled] | type[Keyed]] = {"shuffled": Shuffled, "keyed": Keyed}


def order_of(seed: int, samples: int, name: str | None = None) -> Shuffled | Keyed:
    """The order of a data set of this size. name: that of a checkpoint, which its run keeps."""
    return ORDERS[name or ("shuffled" if samples <= SHUFFLED_UP_TO else "keyed")](seed, samples)


def epoch_order(seed: int, epoch: int, samples: int) -> list[int]:
    """The whole order of an epoch, a permutation of range(samples)."""
    return order_of(seed, samples).indices(epoch, 0, samples)


def permuted(seed: int, epoch: int, positions: np.ndarray, samples: int) -> np.ndarray:
    """Where a permutation of range(samples) takes these positions: int64 [N] -> int64 [N]. No state, no table.

    A Feistel network on the cells of a rectangle with at least `samples` cells: row and column are in turn shifted by a
    hash of the other, which is invertible whatever the hash. A position that leaves range(samples) walks on along its
    cycle until it is back; the rectangle has fewer than one row too many, so that few do. Source: J. Black, P. Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002 (generalised Feistel, cycle walking); the hash is splitmix64.
    """
    columns = math.isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    found = _shifted(positions.astype(np.uint64), rows, columns, seed, epoch)
    outside = np.flatnonzero(found >= samples)
    while len(outside):
        found[outside] = _shifted(found[outside], rows, columns, seed, epoch)
        outside = outside[found[outside] >= samples]
    return found.astype(np.int64)


def _shifted(cells: np.ndarray, rows: int, columns: int, seed: int, epoch: int) -> np.ndarray:
    """The network itself, a permutation of range(rows * columns)."""
    row, column = np.divmod(cells, np.uint64(columns))
    for number, round_key in enumerate(_round_keys(seed, epoch)):
        if number % 2 == 0:
            row = _added(row, column, round_key, rows)
        else:
            column = _added(column, row, round_key, columns)
    return row * np.uint64(columns) + column


def _added(value: np.ndarray, other: np.ndarray, round_key: np.uint64, size: int) -> np.ndarray:
    """`value` plus a hash of `other`, modulo `size`."""
    added = splitmix64(other * np.uint64(GAMMA) + round_key)
    added %= np.uint64(size)
    added += value  # below 2 * size: no overflow
    added -= np.uint64(size) * (added >= size).astype(np.uint64)
    return added


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    counters = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(GAMMA)
    return tuple(splitmix64(counters + key(seed + _SALT, epoch)))
