"""The UCI handwritten digits (1,797 grey images of 8 x 8), shipped with the package: no download."""

from collections.abc import Sequence
from importlib import resources
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from trainapp.data.loader import BatchedDataset
from trainapp.data.stateless_random import uniform
from trainapp.validation import Bool, NonNegativeInt

# Of the training split's pixels, which lie in 0..16.
MEAN = 4.892
STD = 6.019
MAX_SHIFT = 1  # pixels; the digits fill the frame's height, and two would cut off a quarter of it
INTENSITY = 0.1  # the pixels are scaled by 1 - INTENSITY to 1 + INTENSITY


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return all images, uint8 [1797, 8, 8] in 0..16, and labels, uint8 [1797], in the source's order."""
    with resources.files("trainapp.data").joinpath("files/digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return arrays["images"], arrays["labels"]


def split_indices(labels: np.ndarray, split: str) -> np.ndarray:
    """Return the positions in the source of the 1,437 training or the 360 validation images, ascending: of the images
    ordered by label, every fifth is for validation.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[np.argsort(labels, kind="stable")[::5]] = True
    is_in_split = held_out if split == "val" else ~held_out
    return np.flatnonzero(is_in_split)


class Digits(BatchedDataset):
    """Handwritten digits: inputs float32 [B, 1, 8, 8] of about zero mean, unit variance; targets int64 [B].

    Args:
        split: the training images or those held out.
        seed: of the augmentation, not of the split.
        augment: shift each training image by up to 1 pixel each way (zeros move in) and scale its intensity by 0.9 to
            1.1, differently in each epoch. Off by default: the digits are centred, and in runs of 5 to 40 epochs it
            cost small networks 0.7 to 7.5 points of validation accuracy.

    Source: see files/digits.README.md.
    """

    task = "classification"

    def __init__(self, split: Literal["train", "val"], seed: NonNegativeInt = 0, augment: Bool = False):
        images, labels = load()
        positions = split_indices(labels, split)
        self.spec: dict[str, Any] = {"image_shape": (1, 8, 8), "num_classes": 10}
        self.seed = seed
        self.epoch = 0
        self.augment = augment and split == "train"
        self.targets = labels[positions].astype(np.int64)  # also for `data.sampling.weights=balanced`

        # Without augmentation: normalised, [N, 1, 8, 8].
        pixels = (images[positions] / STD).astype(np.float32)
        normalised = pixels - np.float32(MEAN / STD)
        self._images = normalised[:, None]

        # Every shift of every image, [N, 3, 3, 8, 8]: a view, no copies.
        border = (MAX_SHIFT, MAX_SHIFT)
        padded = np.pad(pixels, ((0, 0), border, border))
        self._shifted = sliding_window_view(padded, (8, 8), axis=(1, 2))

    def __len__(self) -> int:
        return len(self.targets)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's augmentation, which is a function of (seed, epoch, sample index)."""
        self.epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        positions = self._positions(indices)
        # For small batches numpy's take is 3-6 times quicker than indexing a tensor with a list or a tensor.
        if self.augment:
            pixels = self._augmented(positions)
        else:
            pixels = self._images.take(positions, axis=0)
        targets = self.targets.take(positions)
        return {"inputs": torch.from_numpy(pixels), "targets": torch.from_numpy(targets)}

    def _augmented(self, positions: np.ndarray, view: int = 0) -> np.ndarray:
        """Return the images at these positions, shifted and scaled: float32 [B, 1, 8, 8]. Each view has random numbers
        of its own.
        """
        draws_per_view = 3
        first_draw = draws_per_view * view
        draws = uniform(self.seed, self.epoch, positions, first_draw + draws_per_view)[:, first_draw:]

        # The first two draws choose one of the shifts, the third the intensity.
        shifts = 2 * MAX_SHIFT + 1  # in each direction
        rows, columns = (draws[:, :2] * shifts).astype(np.int64).T
        intensities = 1 + INTENSITY * (2 * draws[:, 2] - 1)

        pixels = self._shifted[positions, rows, columns][:, None]
        pixels *= intensities.astype(np.float32)[:, None, None, None]
        pixels -= np.float32(MEAN / STD)
        return pixels


class DigitPairs(Digits):
    """Two views of each digit, for `task=contrastive`: inputs float32 [B, 2, 1, 8, 8], each shifted and scaled
    differently as with `augment`, also in validation.
    """

    task = "contrastive"

    def __init__(self, split: Literal["train", "val"], seed: NonNegativeInt = 0):
        super().__init__(split, seed)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        positions = self._positions(indices)
        views = [self._augmented(positions, view) for view in range(2)]
        pixels = np.stack(views, axis=1)
        targets = self.targets.take(positions)
        return {"inputs": torch.from_numpy(pixels), "targets": torch.from_numpy(targets)}
