"""Which samples of an indexable data set a step trains on: a pure function of (seed, epoch, samples consumed).

It does not depend on batch size, workers or ranks, so a retry or a resume may change all three and still see the same
samples. The order of an epoch is a keyed permutation, computed on demand: memory and time do not grow with the data
set. With `data.sampling.weights` each position is a draw with replacement instead.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainapp.data.batch import own_part
from trainapp.errors import UserError
from trainapp.rng import FACTORS, GAMMA

BLOCK = 8192  # positions computed at a time: 0.01 ms per step instead of 0.07 ms for one step's positions only
BALANCED = "balanced"
_SALT = 0x7765696768  # so that draws share no random numbers with augmentation, which has the same seed


class Share(NamedTuple):
    """This rank's samples of a step. total: number of samples over all ranks. largest: number on the rank with the
    most. after: the position `(epoch, consumed)` after the step. start: the first one's place among all of the step's.
    """

    numbers: Sequence[int]
    total: int
    largest: int
    after: tuple[int, int]
    start: int


class Draw(int):
    """The index of a sample that may occur more than once per epoch, with its position in the epoch."""

    position: int

    def __new__(cls, index: int, position: int = 0) -> "Draw":  # the default: unpickling sets it afterwards
        draw = super().__new__(cls, index)
        draw.position = position
        return draw


class Source:
    """Training samples, step by step: `Sampler` for indexable data, `data.stream.Stream` for a stream. A position is
    `(epoch, samples consumed in it)`.

    fetched: the object that the loader indexes with a share's numbers. state_owner: the object with the data's state,
    see `stateful`. samples: number of samples in the data, 0 if unknown. order_name: identifies the order in a
    checkpoint. looks_ahead: whether later steps may be requested. misfit: after a resume, why the saved position cannot
    be continued.
    """

    fetched: Any
    state_owner: Any
    samples: int
    order_name: str
    looks_ahead: bool
    misfit: str | None = None

    def share(self, epoch: int, consumed: int, size: int) -> Share:
        """This rank's samples of the step of `size` samples that begins at a position."""
        raise NotImplementedError

    def first(self, most: int) -> tuple[Any, list[Any]]:
        """An indexable data set, and the indices of the first samples of training, none of which are consumed."""
        raise NotImplementedError

    def steps_left(self, consumed: int, size: int) -> int | None:
        """Steps of this size left in an epoch after its first `consumed` samples; None if unknown."""
        return None

    def commit(self) -> None:
        """Count the last share's samples as trained."""

    def begin_epoch(self, epoch: int) -> None:
        """Skip the rest of earlier epochs."""

    def close(self) -> None:
        """End the reader processes."""


class Sampler(Source):
    """The samples of an indexable data set. The position is the complete state: nothing is committed or saved.

    weights: `data.sampling.weights`, see `weights_of`; None: every sample once per epoch.
    Raises UserError for weights that do not fit the data set.
    """

    looks_ahead = True

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        rank: int,
        world_size: int,
        drop_last: bool = False,
        weights: str | None = None,
    ):
        self.fetched = self.state_owner = dataset
        self.samples, self.rank, self.world_size, self.drop_last = len(dataset), rank, world_size, drop_last
        self.order: Permutation | Weighted
        if weights is None:
            self.order = Permutation(seed, self.samples)
        else:
            self.order = Weighted(seed, weights_of(dataset, weights))
        self.order_name = self.order.name
        # Keeps those of the current step and the next.
        self.share = lru_cache(maxsize=2)(self.share)  # type: ignore[method-assign]

    def share(self, epoch: int, consumed: int, size: int) -> Share:
        total = max(0, min(size, self.samples - consumed))
        start, end = own_part(total, self.rank, self.world_size)
        behind = consumed + size
        has_another = self.samples - behind >= (size if self.drop_last else 1)
        after = (epoch, behind) if has_another else (epoch + 1, 0)
        numbers = self.order.indices(epoch, consumed + start, consumed + end)
        return Share(numbers, total, -(-total // self.world_size), after, start)

    def steps_left(self, consumed: int, size: int) -> int:
        """Independent of the sizes of earlier steps."""
        left = self.samples - consumed
        return left // size if self.drop_last else -(-left // size)

    def first(self, most: int) -> tuple[Any, list[Any]]:
        return self.fetched, self.order.indices(0, 0, min(most, self.samples))


class Permutation:
    """Every sample once per epoch, by `permuted`. Holds one block of positions, for any number of samples."""

    name = "permutation"

    def __init__(self, seed: int, samples: int):
        self.seed, self.samples = seed, samples
        self._block = lru_cache(maxsize=1)(self._computed)

    def indices(self, epoch: int, start: int, end: int) -> list[int]:
        """The samples at positions [start, end) of an epoch."""
        indices: list[int] = []
        for first in range(start - start % BLOCK, end, BLOCK):
            indices += self._block(epoch, first)[max(0, start - first) : end - first]
        return indices

    def _computed(self, epoch: int, first: int) -> list[int]:
        positions = np.arange(first, min(first + BLOCK, self.samples))
        return permuted(self.seed, epoch, positions, self.samples).tolist()


class Weighted:
    """Every position of an epoch is a draw with replacement, with probabilities proportional to the weights.

    weights: float64 [N], from `weights_of`; the cumulative sums take 8 bytes per sample.
    """

    def __init__(self, seed: int, weights: np.ndarray):
        self.seed, self.samples = seed, len(weights)
        self._sums = np.cumsum(weights)
        self.name = f"weighted-{hashlib.sha256(weights.tobytes()).hexdigest()[:16]}"  # other weights give another order

    def indices(self, epoch: int, start: int, end: int) -> list[Draw]:
        """The draws at the positions [start, end) of an epoch."""
        positions, total = np.arange(start, end), self._sums[-1]
        draws = uniform(self.seed + _SALT, epoch, positions, 1)[:, 0] * total
        draws = np.minimum(draws, np.nextafter(total, 0.0))  # rounding must not reach the total
        samples = np.searchsorted(self._sums, draws, side="right")
        return list(map(Draw, samples.tolist(), positions.tolist()))


def weights_of(dataset: Any, weights: str) -> np.ndarray:
    """One weight per sample, float64 [N].

    weights: `balanced` (all classes of the data set's `targets` or `labels` are equally likely, and all samples of a
    class); the name of an attribute of the data set; or the path of a .npy file. Raises UserError unless that gives an
    array with one number per sample, finite, not negative and not all 0.
    """
    setting = f"data.sampling.weights={weights}"
    names = ("targets", "labels") if weights == BALANCED else (weights,)
    values = next((own for name in names if (own := getattr(dataset, name, None)) is not None), None)
    try:
        if values is None and weights.endswith(".npy"):
            values = np.load(Path(weights).expanduser())
        array = np.asarray(values) if weights == BALANCED else np.asarray(values, np.float64)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{setting}: cannot be read as weights, an array of numbers: {error}") from None
    if values is None or array.shape != (len(dataset),):
        found = "there are none" if values is None else f"their shape is {list(array.shape)}"
        raise UserError(
            f"{setting}: must be {BALANCED} (by the data set's attribute `targets`), the name of an attribute, or the "
            f"path of a .npy file, with one label or weight for each of the {len(dataset)} samples; {found}"
        )
    if weights == BALANCED:
        _, numbers = np.unique(array, return_inverse=True)
        return 1.0 / np.bincount(numbers)[numbers]
    if not (array.min() >= 0 and 0 < array.sum() < np.inf):  # also false for nan
        raise UserError(f"{setting}: weights must be finite, not negative and not all 0, and so must be their sum")
    return array


# --- stateless random numbers and permutations
#
# A value depends on where it is used, not on earlier draws: an augmentation drawn from (seed, epoch,
# sample index) is the same one in whatever batch, worker or retry the sample turns up. Method: the splitmix64 generator
# (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose n-th output is a hash of
# `state + n * GAMMA`: no earlier one is needed.

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
