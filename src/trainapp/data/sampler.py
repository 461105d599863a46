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
    """This rank's samples of a step."""

    numbers: Sequence[int]
    total: int  # samples over all ranks
    largest: int  # samples on the rank with the most
    after: tuple[int, int]  # the position `(epoch, consumed)` after the step
    start: int  # the first one's place among all samples of the step


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
    """

    fetched: Any  # the object that the loader indexes with a share's numbers
    state_owner: Any  # the object with the data's state, see `stateful`
    samples: int  # in the data; 0 if unknown
    order_name: str  # identifies the order in a checkpoint
    looks_ahead: bool  # whether later steps may be requested
    misfit: str | None = None  # after a resume, why the saved position cannot be continued

    def share(self, epoch: int, consumed: int, size: int) -> Share:
        """Return this rank's samples of the step of `size` samples that begins at a position."""
        raise NotImplementedError

    def first(self, most: int) -> tuple[Any, list[Any]]:
        """Return an indexable data set, and the indices in it of the first samples of training, at most so many. None
        of them are consumed.
        """
        raise NotImplementedError

    def steps_left(self, consumed: int, size: int) -> int | None:
        """Return the steps of this size left in an epoch after its first `consumed` samples; None if unknown."""
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
        self.fetched = dataset
        self.state_owner = dataset
        self.samples = len(dataset)
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.order: Permutation | Weighted
        if weights is None:
            self.order = Permutation(seed, self.samples)
        else:
            self.order = Weighted(seed, weights_of(dataset, weights))
        self.order_name = self.order.name
        # Each step asks for its share several times, which takes 0.1 ms each with weights. The shares of the current
        # step and of the next one are cached.
        self.share = lru_cache(maxsize=2)(self.share)  # type: ignore[method-assign]

    def share(self, epoch: int, consumed: int, size: int) -> Share:
        # The step takes the next samples of the epoch, and this rank its part of them.
        remaining = max(0, self.samples - consumed)
        total = min(size, remaining)
        start, end = part_bounds(total, self.rank, self.world_size)
        numbers = self.order.indices(epoch, consumed + start, consumed + end)
        largest = -(-total // self.world_size)  # rounded up

        # The next step begins after it, or in the next epoch if too few samples are left.
        consumed_after = consumed + size
        smallest_step = size if self.drop_last else 1
        epoch_has_another_step = self.samples - consumed_after >= smallest_step
        after = (epoch, consumed_after) if epoch_has_another_step else (epoch + 1, 0)
        return Share(numbers, total, largest, after, start)

    def steps_left(self, consumed: int, size: int) -> int:
        """Return the steps left in an epoch, whatever the sizes of earlier steps were."""
        remaining = self.samples - consumed
        if self.drop_last:
            return remaining // size
        return -(-remaining // size)  # rounded up

    def first(self, most: int) -> tuple[Any, list[Any]]:
        return self.fetched, self.order.indices(0, 0, min(most, self.samples))


class Permutation:
    """Every sample once per epoch, by `permuted`. Holds one block of positions, for any number of samples."""

    name = "permutation"

    def __init__(self, seed: int, samples: int):
        self.seed = seed
        self.samples = samples
        self._block = lru_cache(maxsize=1)(self._compute_block)

    def indices(self, epoch: int, start: int, end: int) -> list[int]:
        """Return the samples at positions [start, end) of an epoch."""
        indices: list[int] = []
        first_block = start - start % BLOCK
        for block_start in range(first_block, end, BLOCK):
            block = self._block(epoch, block_start)
            first = max(0, start - block_start)  # after 0 only in the first block
            indices.extend(block[first : end - block_start])
        return indices

    def _compute_block(self, epoch: int, start: int) -> list[int]:
        positions = np.arange(start, min(start + BLOCK, self.samples))
        return permuted(self.seed, epoch, positions, self.samples).tolist()


class Weighted:
    """Every position of an epoch is a draw with replacement, with probabilities proportional to the weights.

    weights: float64 [N], from `weights_of`; the cumulative sums take 8 bytes per sample.
    """

    def __init__(self, seed: int, weights: np.ndarray):
        self.seed = seed
        self.samples = len(weights)
        self._sums = np.cumsum(weights)
        digest = hashlib.sha256(weights.tobytes()).hexdigest()
        self.name = f"weighted-{digest[:16]}"  # other weights give another order

    def indices(self, epoch: int, start: int, end: int) -> list[Draw]:
        """Return the draws at the positions [start, end) of an epoch."""
        positions = np.arange(start, end)
        total = self._sums[-1]
        # Inverse transform sampling: a point of [0, total) falls into a sample's interval with its probability.
        points = uniform(self.seed + _SALT, epoch, positions, 1)[:, 0] * total
        points = np.minimum(points, np.nextafter(total, 0.0))  # rounding must not reach the total
        samples = np.searchsorted(self._sums, points, side="right")
        return list(map(Draw, samples.tolist(), positions.tolist()))


def weights_of(dataset: Any, weights: str) -> np.ndarray:
    """Return one weight per sample, float64 [N].

    Raises UserError unless the setting gives an array with one number per sample, finite, not negative and not all 0.

    Args:
        dataset: with N samples.
        weights: `balanced` (all classes of the data set's `targets` or `labels` are equally likely, and all samples of
            a class); the name of an attribute of the data set; or the path of a .npy file.
    """
    setting = f"data.sampling.weights={weights}"
    is_balanced = weights == BALANCED

    # Labels of any type, or one number per sample.
    dtype: Any
    if is_balanced:
        values = _labels_of(dataset)
        dtype = None
    else:
        values = getattr(dataset, weights, None)
        dtype = np.float64
    try:
        if values is None and weights.endswith(".npy"):
            values = np.load(Path(weights).expanduser())
        array = np.asarray(values, dtype=dtype)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{setting}: cannot be read as weights, an array of numbers: {error}") from None

    if values is None or array.shape != (len(dataset),):
        problem = "there are none"
        if values is not None:
            problem = f"their shape is {list(array.shape)}"
        raise UserError(
            f"{setting}: must be {BALANCED} (by the data set's attribute `targets`), the name of an attribute, or the "
            f"path of a .npy file, with one label or weight for each of the {len(dataset)} samples; {problem}"
        )

    # All classes are equally likely if the samples of each share a weight of 1.
    if is_balanced:
        _, classes, class_sizes = np.unique(array, return_inverse=True, return_counts=True)
        return 1.0 / class_sizes[classes]
    if not (array.min() >= 0 and 0 < array.sum() < np.inf):  # also false for nan
        raise UserError(f"{setting}: weights must be finite, not negative and not all 0, and so must be their sum")
    return array


def _labels_of(dataset: Any) -> Any:
    """Return the classes of the samples, None if the data set does not tell them."""
    targets = getattr(dataset, "targets", None)
    if targets is not None:
        return targets
    return getattr(dataset, "labels", None)
