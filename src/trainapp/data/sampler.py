"""Which samples of an indexable data set a step trains on: a pure function of (seed, epoch, samples consumed).

It does not depend on batch size, workers or ranks, so a retry or a resume may change all three and still see the same
samples. The order of an epoch is a keyed permutation, computed on demand: memory and time do not grow with the data
set. With `data.sampling.weights` each position is a draw with replacement instead.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainapp.data.batch import part_bounds
from trainapp.data.stateless_random import permuted, uniform
from trainapp.errors import UserError

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
        self, dataset: Any, *, seed: int, rank: int, world: int, drop_last: bool = False, weights: str | None = None
    ):
        self.fetched = self.state_owner = dataset
        self.samples, self.rank, self.world, self.drop_last = len(dataset), rank, world, drop_last
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
        start, end = part_bounds(total, self.rank, self.world)
        behind = consumed + size
        has_another = self.samples - behind >= (size if self.drop_last else 1)
        after = (epoch, behind) if has_another else (epoch + 1, 0)
        numbers = self.order.indices(epoch, consumed + start, consumed + end)
        return Share(numbers, total, -(-total // self.world), after, start)

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
