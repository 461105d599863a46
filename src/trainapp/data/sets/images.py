"""Images in class folders: `data=images`."""

import logging
import mmap
import os
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from trainapp.data.sets import image_files, image_pixels
from trainapp.errors import UserError
from trainapp.validation import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Str

log = logging.getLogger(__name__)

Share = Annotated[float, Field(ge=0, le=1, strict=True)]
PositiveShare = Annotated[float, Field(gt=0, le=1, strict=True)]


class Images(torch.utils.data.Dataset):
    """Images of class folders: inputs float32 [3, image_size, image_size], normalised; targets int64, the class.

    With mixup or cutmix, the targets of training are float32 [classes]: the share of each class.

    path: a folder with train/ and val/ (or validation/), each with one folder per class; or with the class folders
        themselves. Images may lie at any depth below their class. See `image_files.SUFFIXES`.
    image_size: pixels of a side. Training sees a random crop of a random size and shape, evaluation the central square
        with 7/8 of the shorter side.
    val_fraction: the part of each class that is for validation where there is no val/; 1 for all of it. split_seed: of
        that choice, which does not depend on the seed of the training.
    classes: names of the classes in their order; folders of others are left out. None: all folders, sorted.
    scale: smallest and largest share of an image's area in a random crop. flip: probability of a mirror image.
    mixup, cutmix: parameter of the beta distribution that the share of a second image is drawn from; 0: off. With both,
        each sample has one of them. The second image is chosen by the sample's own random numbers, so that it does not
        depend on the batch.
    mean, std: of the red, green and blue of pixels in 0..1, which become numbers of mean 0 and variance 1.
    on_error: what to do about a file that cannot be read: stop, or skip, where the next image in the order of
        names that can be read takes its place, so that every batch keeps its size.

    A sample is a function of (seed, epoch, index), through the generators that the loader seeds.
    Raises UserError for folders that do not fit this description.
    """

    task = "classification"

    def __init__(
        self,
        split: Literal["train", "val"],
        path: Str | None = None,
        image_size: PositiveInt = 224,
        val_fraction: Share = 0.1,
        split_seed: NonNegativeInt = 0,
        classes: list[Str] | None = None,
        scale: tuple[PositiveShare, PositiveShare] = (0.08, 1.0),
        flip: Share = 0.5,
        mixup: NonNegativeFloat = 0.0,
        cutmix: NonNegativeFloat = 0.0,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225),
        on_error: Literal["stop", "skip"] = "stop",
    ):
        if path is None:
            raise UserError("data.path=null: name the folder of the images, which holds train/ and val/ or the classes")
        if scale[0] > scale[1]:
            raise UserError(f"data.scale={list(scale)}: the smallest share must not be above the largest")
        found = image_files.find(path, split, val_fraction, split_seed, classes)
        self.path, self.class_names, self.targets = path, found.class_names, found.labels
        self.image_size, self.is_training = image_size, split == "train"
        self.spec: dict[str, Any] = {
            "image_shape": (3, image_size, image_size),
            "num_classes": len(self.class_names),
            "classes": self.class_names,
        }
        self.scale, self.flip, self.mixup, self.cutmix = (scale[0], scale[1]), flip, mixup, cutmix
        self.on_error = on_error
        self._mean, self._std = np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32)
        self._files = found.paths
        # One byte per image in memory that forked loader processes share: which were left out.
        self._left_out = np.frombuffer(mmap.mmap(-1, max(1, len(self._files))), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def left_out(self) -> list[str]:
        """The files that could not be read so far, by any process of this rank's loader."""
        return [os.fsdecode(path) for path in self._files[np.flatnonzero(self._left_out)]]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample. Raises IndexError beyond the data, and UserError for a file that cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample indices must lie in [0, {len(self)}), got {index}")
        if not self.is_training:
            image, label = self._readable(index)
            box = image_pixels.center_box(*image.size)
            return {"inputs": torch.from_numpy(self._resized(image, box)), "targets": label}
        rng = np.random.default_rng(np.random.randint(2**63, dtype=np.int64))
        pixels, label = self._augmented(index, rng)
        if not (self.mixup or self.cutmix):
            return {"inputs": torch.from_numpy(pixels), "targets": label}
        pixels, shares = self._mixed(pixels, label, rng)
        return {"inputs": torch.from_numpy(pixels), "targets": torch.from_numpy(shares)}

    def _augmented(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        image, label = self._readable(index)
        width, height = image.size
        pixels = self._resized(image, image_pixels.random_box(rng, width, height, self.scale))
        if rng.random() < self.flip:
            pixels = np.ascontiguousarray(pixels[..., ::-1])
        return pixels, label

    def _mixed(self, pixels: np.ndarray, label: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """With another image of the data set: `(pixels, shares of the classes)`."""
        cuts = bool(self.cutmix) and (not self.mixup or rng.random() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        share = float(rng.beta(alpha, alpha))  # of the other image
        other, other_label = self._augmented(int(rng.integers(len(self))), rng)
        if cuts:
            left, top, right, bottom = image_pixels.cut_box(rng, self.image_size, share)
            pixels[:, top:bottom, left:right] = other[:, top:bottom, left:right]
            share = (right - left) * (bottom - top) / self.image_size**2
        else:
            pixels = np.float32(1 - share) * pixels + np.float32(share) * other
        shares = np.zeros(len(self.class_names), dtype=np.float32)
        shares[label] += 1 - share
        shares[other_label] += share
        return pixels, shares

    def _resized(self, image: Any, box: image_pixels.Box) -> np.ndarray:
        return image_pixels.resized(image, box, self.image_size, self._mean, self._std)

    def _readable(self, index: int) -> tuple[Any, int]:
        """The image and its class; with on_error=skip those of the next image that can be read. Raises UserError."""
        reason = ""
        for number in range(len(self)):
            place = (index + number) % len(self)
            path = os.fsdecode(self._files[place])
            try:
                return image_pixels.read(path), int(self.targets[place])
            except image_pixels.UnreadableImage as error:
                reason = f"{path} cannot be read as an image ({error})"
            if self.on_error == "stop":
                raise UserError(
                    f"data.on_error=stop: {reason}; repair or remove the file, or use data.on_error=skip, which counts "
                    "such files and takes the next image in their place"
                )
            self._leave_out(place, reason)
        raise UserError(f"data.path={self.path}: none of the {len(self)} images can be read; the last one: {reason}")

    def _leave_out(self, place: int, reason: str) -> None:
        if not self._left_out[place]:
            self._left_out[place] = 1
            log.warning(
                "data.on_error=skip: %s; the next image takes its place (%d left out so far)",
                reason,
                int(self._left_out.sum()),
            )
