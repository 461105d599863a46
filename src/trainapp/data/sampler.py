"""Which samples of an indexable data set a step trains on: a pure function of (seed, epoch, samples consumed).

It depends on neither batch size nor workers nor ranks, so a retry or a resume may change all three and still see the
same samples. The order of an epoch is a keyed permutation, computed where it is needed: memory and time do not grow
with the data set. With `data.sampling.weights` each position is a draw with replacement instead.
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from trainapp.data.counter_rng import permuted, uniform
from trainapp.errors import UserError

BLOCK = 8192  # positions computed at a time: a step alone would take 0.2 ms, of which its share of a block is 0.01
BALANCED = "balanced"
_SALT = 0x7765696768  # draws share no random numbers with augmentation, which has the same seed


class Share(NamedTuple):
    """This rank's samples of a step. total: over all ranks. largest: of the rank with the most. after: the position
    `(epoch, consumed)` that follows the step.
    """

    numbers: Sequence[int]
    total: int
    largest: int
    after: tuple[int, int]


class Draw(int):
    """The index of a sample that may come more than once in an epoch, with the position that it is drawn for."""

    position: int

    def __new__(cls, index: int, position: int) -> "Draw":
        draw = super().__new__(cls, index)
        draw.position = position
        return draw

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.position


class Source:
    """Training samples, step by step: of indexable data by `Sampler`, of a stream by `data.stream.Stream`. A position
    is `(epoch, consumed samples of it)`.

    fetched: what the loader indexes with the numbers of a share. state_owner: holds the data's state, see
    `stateful`. samples: in the data, 0 where that is unknown. order_name: what a checkpoint must know of the
    order besides the position. looks_ahead: whether later steps may be asked for. misfit: after a resume, why the saved
    position cannot be continued.
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

    def first(self, most: int) -> Any:
        """An indexable data set that begins with the first `most` samples, none of which are consumed."""
        raise NotImplementedError

    def steps_left(self, consumed: int, size: int) -> int | None:
        """Steps of this size in an epoch after its first `consumed` samples; None where that is unknown."""
        return None

    def commit(self, epoch: int, consumed: int, size: int) -> None:
        """The samples of this step are trained."""

    def begin_epoch(self, epoch: int) -> None:
        """Leave out what is left of the epochs before this one."""

    def close(self) -> None:
        """End the processes that read."""


class Sampler(Source):
    """The samples of an indexable data set. A position says everything: nothing is committed or saved.

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
            self.order = Weighted(seed, weights_of(dataset, weights), f"data.sampling.weights={weights}")
        self.order_name = self.order.name
        self._shares = functools.lru_cache(maxsize=2)(self._share)  # the present step's and the next

    def share(self, epoch: int, consumed: int, size: int) -> Share:
        """See `Source`."""
        return self._shares(epoch, consumed, size)

    def _share(self, epoch: int, consumed: int, size: int) -> Share:
        total = max(0, min(size, self.samples - consumed))
        start, end = (consumed + total * rank // self.world for rank in (self.rank, self.rank + 1))
        behind = consumed + size
        has_another = self.samples - behind >= (size if self.drop_last else 1)
        after = (epoch, behind) if has_another else (epoch + 1, 0)
        return Share(self.order.indices(epoch, start, end), total, -(-total // self.world), after)

    def steps_left(self, consumed: int, size: int) -> int:
        """However large the steps before were."""
        left = self.samples - consumed
        return left // size if self.drop_last else -(-left // size)

    def first(self, most: int) -> Any:
        """The whole data set."""
        return self.fetched


class Permutation:
    """Every sample once per epoch, by `permuted`. Holds one block of positions, whatever the number of samples."""

    name = "permutation"

    def __init__(self, seed: int, samples: int):
        self.seed, self.samples = seed, samples
        self._block = functools.lru_cache(maxsize=1)(self._computed)

    def indices(self, epoch: int, start: int, end: int) -> list[int]:
        """The samples at the positions [start, end) of an epoch."""
        indices: list[int] = []
        for first in range(start - start % BLOCK, end, BLOCK):
            indices += self._block(epoch, first)[max(0, start - first) : end - first].tolist()
        return indices

    def _computed(self, epoch: int, first: int) -> np.ndarray:
        positions = np.arange(first, min(first + BLOCK, self.samples))
        return permuted(self.seed, epoch, positions, self.samples)


def epoch_order(seed: int, epoch: int, samples: int) -> list[int]:
    """The whole order of an epoch, a permutation of range(samples)."""
    return Permutation(seed, samples).indices(epoch, 0, samples)


class Weighted:
    """Every position of an epoch is a draw with replacement, with probabilities in proportion to the weights.

    weights: float64 [N]; the cumulative sums take 8 bytes per sample. setting: for messages.
    Raises UserError for weights that are negative or not finite, or all 0.
    """

    def __init__(self, seed: int, weights: np.ndarray, setting: str):
        self.seed, self.samples = seed, len(weights)
        self._sums = np.cumsum(weights)
        if not (weights.min() >= 0 and 0 < self._sums[-1] < np.inf):  # nor nan, which is not >= 0
            raise UserError(f"{setting}: weights must be finite, not negative and not all 0, and so must be their sum")
        self.name = f"weighted-{hashlib.sha256(weights.tobytes()).hexdigest()[:16]}"  # other weights: another order

    def indices(self, epoch: int, start: int, end: int) -> list[Draw]:
        """The draws at the positions [start, end) of an epoch."""
        positions, total = np.arange(start, end), self._sums[-1]
        draws = uniform(self.seed + _SALT, epoch, positions, 1)[:, 0] * total
        draws = np.minimum(draws, np.nextafter(total, 0.0))  # rounding must not reach the total
        samples = np.searchsorted(self._sums, draws, side="right")
        return list(map(Draw, samples.tolist(), positions.tolist()))


def weights_of(dataset: Any, weights: str) -> np.ndarray:
    """One weight per sample, float64 [N].

    weights: `balanced`, where all classes of the data set's `targets` (or `labels`) are equally frequent; the name of
    an attribute of the data set; or the path of a .npy file. Raises UserError where that gives no array with one number
    per sample.
    """
    setting = f"data.sampling.weights={weights}"
    if weights == BALANCED:
        return _balanced(dataset, setting)
    values = getattr(dataset, weights, None) if weights.isidentifier() else None
    array = _one_per_sample(_loaded(weights, setting) if values is None else values, dataset, setting)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{setting}: must be numbers, but its entries are of type {array.dtype}")
    return array.astype(np.float64)


def _balanced(dataset: Any, setting: str) -> np.ndarray:
    """Every class with the same probability, and within a class every sample."""
    name = next((name for name in ("targets", "labels") if getattr(dataset, name, None) is not None), None)
    if name is None:
        raise UserError(
            f"{setting}: {type(dataset).__name__} does not say which class a sample belongs to; give it an attribute "
            "`targets` with one label per sample, or weights of your own"
        )
    labels = _one_per_sample(getattr(dataset, name), dataset, f"{setting} ({name})")
    if (labels != labels).any():  # nan
        raise UserError(f"{setting} ({name}): every sample needs a label, such as 'unknown'")
    _, numbers = np.unique(labels, return_inverse=True)
    return 1.0 / np.bincount(numbers)[numbers]


def _loaded(path: str, setting: str) -> np.ndarray:
    if not path.endswith(".npy"):
        raise UserError(
            f"{setting}: must be {BALANCED}, an attribute of the data set with one weight per sample, or the path of a "
            ".npy file with them"
        )
    try:
        return np.load(Path(path).expanduser(), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{setting}: the file cannot be read as an array: {error}") from None


def _one_per_sample(values: Any, dataset: Any, setting: str) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.shape != (len(dataset),):
        raise UserError(
            f"{setting}: must have one entry per sample, {len(dataset)}, but its shape is {list(array.shape)}"
        )
    return array
