"""`data.sampling`: samples drawn with replacement, by weights or so that all classes are equally frequent.

A draw is a function of (seed, epoch, position), like everything else that decides which samples a step trains on: it
depends on neither micro-batch nor ranks nor workers. So the weights stay what they were at first: those of an attribute
are copied; a file, which stays out of memory, must not change. Beside them it takes 16 bytes per `BLOCK` samples.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainapp.data.counter_rng import uniform
from trainapp.data.order import Draw
from trainapp.errors import UserError

BLOCK = 256  # weights that one sum stands for
_DRAWN_AT_ONCE = 4096  # draws, each of which looks at one block
_READ_AT_ONCE = 4096  # blocks, while the sums are made: 8 MiB
_MOST_CLASSES = 2**24  # of labels that count themselves; others are sorted first
_PLACES = np.random.default_rng(0).integers(0, 2**63, BLOCK, dtype=np.uint64) * 2 + 1  # odd factors of a block's digest
_SALT = 0x7765696768  # draws share no random numbers with augmentation, which has the same seed
BALANCED = "balanced"


class Weighted:
    """An order in which every position is a draw with replacement: see `data.order.Order`.

    weights: one per sample, of any numeric type; memory-mapped arrays are read where they are needed. by_label: if
    given, `weights` are labels, and this is the weight of each. setting: for messages.
    Raises UserError for weights that are negative or not finite, or all 0; and at a draw for those that have changed.
    """

    def __init__(self, seed: int, weights: np.ndarray, setting: str, by_label: np.ndarray | None = None):
        self.seed, self.samples = seed, len(weights)
        self._weights, self._by_label = weights, by_label
        blocks = -(-self.samples // BLOCK)
        sums, digest = np.empty(blocks), hashlib.sha256()
        self._setting, self._digests = setting, np.empty(blocks, np.uint64)
        for first in range(0, blocks, _READ_AT_ONCE):
            rows, own = self._rows(np.arange(first, min(first + _READ_AT_ONCE, blocks)))
            sums[first : first + len(rows)] = rows.sum(1)
            self._digests[first : first + len(rows)] = own
            digest.update(rows.tobytes())
            if not (np.isfinite(rows).all() and rows.min() >= 0):
                raise UserError(f"{setting}: weights must be finite and not negative")
        self._sums = np.cumsum(sums)
        if not 0 < self._sums[-1] < np.inf:
            raise UserError(f"{setting}: the weights must have a finite sum above 0, but add up to {self._sums[-1]:g}")
        self.name = f"weighted-{digest.hexdigest()[:16]}"  # other weights are another order

    def indices(self, epoch: int, start: int, end: int) -> list[Draw]:
        """The draws at the positions [start, end) of an epoch."""
        draws: list[Draw] = []
        for first in range(start, end, _DRAWN_AT_ONCE):
            positions = np.arange(first, min(first + _DRAWN_AT_ONCE, end))
            samples = self._drawn(uniform(self.seed + _SALT, epoch, positions, 2))
            draws += map(Draw, samples.tolist(), positions.tolist())
        return draws

    def _drawn(self, draws: np.ndarray) -> np.ndarray:
        """First the block, in proportion to its sum, then the sample in it. draws: in [0, 1), float64 [N, 2]."""
        blocks = np.searchsorted(self._sums, _below(draws[:, 0], self._sums[-1]), side="right")
        rows, digests = self._rows(blocks)
        if (digests != self._digests[blocks]).any():
            raise UserError(
                f"{self._setting}: the file has changed since the run began, which drew by what was in it; restore "
                "it, or continue with the new weights from the next epoch on, by data.on_change=next_epoch"
            )
        within = np.cumsum(rows, axis=1)
        places = (within <= _below(draws[:, 1], within[:, -1])[:, None]).sum(1)
        return blocks * BLOCK + places

    def _rows(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The weights of these blocks, float64 [N, BLOCK], 0 beyond the last sample; and a digest of each block, uint64
        [N]. A label that is new has the weight 0: the digest tells.
        """
        positions = blocks[:, None] * BLOCK + np.arange(BLOCK)
        is_sample = positions < self.samples
        values = np.asarray(self._weights[np.minimum(positions, self.samples - 1)])
        bits = values.astype(np.float64).view(np.uint64) if values.dtype.kind == "f" else values.astype(np.uint64)
        digests = (np.where(is_sample, bits, np.uint64(0)) * _PLACES).sum(1)
        if self._by_label is not None:
            is_label = (values >= 0) & (values < len(self._by_label))
            values = np.where(is_label, self._by_label[np.where(is_label, values, 0)], 0.0)
        return np.where(is_sample, values, 0.0).astype(np.float64), digests


def _below(draws: np.ndarray, total: Any) -> np.ndarray:
    """Draws from [0, total): rounding must not reach the total, beyond which there is nothing."""
    return np.minimum(draws * total, np.nextafter(total, 0.0))


def weighted_order(seed: int, dataset: Any, weights: str) -> Weighted:
    """The order that `data.sampling.weights` asks for: `balanced`, the name of an attribute of the data set, or the
    path of a .npy file. Raises UserError where that does not give one number per sample.
    """
    setting = f"data.sampling.weights={weights}"
    if weights == BALANCED:
        return _balanced(seed, dataset, setting)
    values = getattr(dataset, weights, None) if weights.isidentifier() else None
    if values is None:
        values = _loaded(weights, setting)
    return Weighted(seed, _one_per_sample(values, dataset, setting), setting)


def _balanced(seed: int, dataset: Any, setting: str) -> Weighted:
    """Every class with the same probability, and within a class every sample."""
    name = next((name for name in ("targets", "labels") if getattr(dataset, name, None) is not None), None)
    if name is None:
        raise UserError(
            f"{setting}: {type(dataset).__name__} does not say which class a sample belongs to; give it an attribute "
            "`targets` with one label per sample, or weights of your own"
        )
    labels = _one_per_sample(getattr(dataset, name), dataset, f"{setting} ({name})", numeric=False)
    if labels.dtype.kind not in "iu" or int(labels.min()) < 0 or int(labels.max()) >= _MOST_CLASSES:
        labels = _numbered(labels, f"{setting} ({name})")
    counts = np.bincount(labels.astype(np.int64, copy=False))
    return Weighted(seed, labels, setting, by_label=1.0 / np.maximum(counts, 1))


def _loaded(path: str, setting: str) -> np.ndarray:
    if not path.endswith(".npy"):
        raise UserError(
            f"{setting}: must be {BALANCED}, an attribute of the data set with one weight per sample, or the path of a "
            ".npy file with them"
        )
    try:
        return np.load(Path(path).expanduser(), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{setting}: the file cannot be read as an array: {error}") from None


def _one_per_sample(values: Any, dataset: Any, setting: str, numeric: bool = True) -> np.ndarray:
    array = _as_array(values, setting)
    if array.shape != (len(dataset),):
        raise UserError(
            f"{setting}: must have one entry per sample, {len(dataset)}, but its shape is {list(array.shape)}"
        )
    if array.dtype.kind not in "biuf" and numeric:
        raise UserError(f"{setting}: must be numbers, but its entries are of type {array.dtype}")
    return array.astype(np.uint8) if array.dtype.kind == "b" else array


def _as_array(values: Any, setting: str) -> np.ndarray:
    """A copy, which later changes of the values do not reach; an array in a file stays there."""
    if np.ma.is_masked(values):
        raise UserError(
            f"{setting}: {int(np.ma.getmaskarray(values).sum())} of its entries are masked, which says nothing about "
            "those samples; give each a value, with `.filled(0)` to leave them out"
        )
    if isinstance(values, np.memmap):
        return values
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            values = (
                values.float() if values.is_floating_point() and values.itemsize < 4 else values
            )  # NumPy lacks bf16
        return np.array(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"{setting}: cannot be read as an array with one entry per sample: {error}") from None


def _numbered(labels: np.ndarray, setting: str) -> np.ndarray:
    """Labels of any one type as numbers from 0 on. Raises UserError where some are missing or of another type."""
    missing = np.zeros(len(labels), bool)
    if labels.dtype.kind == "f":
        missing = np.isnan(labels)
    elif labels.dtype.kind == "O":
        missing = np.array([_is_missing(label) for label in labels])
    if missing.any():
        raise UserError(
            f"{setting}: {int(missing.sum())} of {len(labels)} samples have no label ({labels[missing][0]}), the first "
            f"is sample {int(missing.argmax())}; give every sample one, such as 'unknown'"
        )
    try:
        return np.unique(labels, return_inverse=True)[1]
    except TypeError:
        kinds = sorted({type(label).__name__ for label in labels})
        raise UserError(
            f"{setting}: the labels are of several types ({', '.join(kinds)}); use one, such as str"
        ) from None


def _is_missing(label: Any) -> bool:
    return label is None or type(label).__name__ == "NAType" or (isinstance(label, float) and label != label)
