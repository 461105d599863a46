"""Images in class folders, `data=images`: FOLDER/train/cat/1.jpg and FOLDER/val/dog/a/2.png, or FOLDER/cat/1.jpg.

Random resized crop: Szegedy et al., "Going Deeper with Convolutions" (arXiv:1409.4842). Mixup: Zhang et al.
(arXiv:1710.09412). CutMix: Yun et al. (arXiv:1905.04899).
"""

import itertools
import logging
import math
import os
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from trainapp.data.sets.image_folders import find_images
from trainapp.errors import UserError
from trainapp.validation import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Str

log = logging.getLogger(__name__)

RATIO = (3 / 4, 4 / 3)  # width to height of a random crop
CENTER = 0.875  # fraction of the shorter side used in evaluation: 224 of 256

Share = Annotated[float, Field(ge=0, le=1, strict=True)]
PositiveShare = Annotated[float, Field(gt=0, le=1, strict=True)]
Box = tuple[int, int, int, int]  # left, top, right, bottom


class Images(torch.utils.data.Dataset):
    """Images in class folders: inputs float32 [3, image_size, image_size], normalised; targets int64, the class.

    With mixup or cutmix, the targets of training are float32 [classes]: the share of each class. With both, each sample
    gets one of them. Training uses a random crop of random size and shape, evaluation the central square with 7/8 of
    the shorter side.

    A sample is a function of (seed, epoch, index), through the generators that the loader seeds.
    Raises UserError for folders that do not fit the description of `path`.

    Args: conf/data/images.yaml describes all of them.
        path: a folder with train/ and val/ (or validation/), each with one folder per class; or with the class folders
            themselves. Images may lie at any depth below their class.
        val_fraction: 1 for all of each class.
        classes: folders of other classes are ignored.
        on_error: skip uses the next readable image in name order: every batch keeps its size.
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
        self.class_names, files, self.targets = find_images(path, split, val_fraction, split_seed, classes)
        # One block of memory: reference counts would make each loader process copy a list of strings.
        encoded_files = [os.fsencode(file) for file in files]
        self._files = np.array(encoded_files, dtype=bytes)
        # By file, whether a warning has named it; shared with the loader processes.
        self._is_named = torch.zeros(len(files), dtype=torch.uint8).share_memory_()
        self.path = path
        self.image_size = image_size
        self.is_training = split == "train"
        self.on_error = on_error
        self.scale = (scale[0], scale[1])
        self.flip = flip
        self.mixup = mixup
        self.cutmix = cutmix
        self._mean = np.array(mean, dtype=np.float32)
        self._std = np.array(std, dtype=np.float32)
        self.spec: dict[str, Any] = {
            "image_shape": (3, image_size, image_size),
            "num_classes": len(self.class_names),
            "classes": self.class_names,
        }

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample. Raises IndexError beyond the data, and UserError for a file that cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample indices must lie in [0, {len(self)}), got {index}")
        pixels, label = self._view(index)
        mixes = self.is_training and (self.mixup or self.cutmix)
        if not mixes:
            return {"inputs": torch.from_numpy(pixels), "targets": label}
        pixels, shares = self._mixed(pixels, label)
        return {"inputs": torch.from_numpy(pixels), "targets": torch.from_numpy(shares)}

    def _view(self, index: int) -> tuple[np.ndarray, int]:
        """Return a random crop, perhaps mirrored, and its class; in evaluation the centre."""
        image, label = self._readable_image(index)
        width, height = image.size
        if not self.is_training:
            box = center_box(width, height)
            return self._resized(image, box), label

        box = random_box(width, height, self.scale)
        pixels = self._resized(image, box)
        if np.random.random() < self.flip:
            pixels = np.ascontiguousarray(pixels[..., ::-1])
        return pixels, label

    def _mixed(self, pixels: np.ndarray, label: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample mixed with another image, and the shares of the classes, float32 [classes]. May write to
        `pixels`.
        """
        # Draw the method, if there are two, the other image's share of the sample, and the other image.
        if self.mixup and self.cutmix:
            uses_cutmix = np.random.random() < 0.5
        else:
            uses_cutmix = self.cutmix > 0
        alpha = self.cutmix if uses_cutmix else self.mixup
        other_share = np.random.beta(alpha, alpha)
        other_index = np.random.randint(len(self))
        other_pixels, other_label = self._view(other_index)

        if uses_cutmix:
            other_share = self._paste_square(other_pixels, pixels, other_share)
        else:
            pixels = np.float32(1 - other_share) * pixels + np.float32(other_share) * other_pixels

        # Added up, since both images may have the same class.
        shares = np.zeros(len(self.class_names), dtype=np.float32)
        shares[label] += 1 - other_share
        shares[other_label] += other_share
        return pixels, shares

    def _paste_square(self, source: np.ndarray, target: np.ndarray, share: float) -> float:
        """Copy a square with this share of the area, centred anywhere and clipped at the border, between two images.
        Return its share after clipping.
        """
        half_side = self.image_size * math.sqrt(share) / 2
        center = np.random.uniform(0, self.image_size, 2)
        corners = np.round([center - half_side, center + half_side])
        corners_inside = corners.clip(0, self.image_size).astype(int)
        (left, top), (right, bottom) = corners_inside

        target[:, top:bottom, left:right] = source[:, top:bottom, left:right]
        pasted_area = (right - left) * (bottom - top)
        return pasted_area / self.image_size**2

    def _resized(self, image: Any, box: Box) -> np.ndarray:
        """Return the box of an RGB image as float32 [3, image_size, image_size], normalised."""
        from PIL.Image import Resampling

        size = (self.image_size, self.image_size)
        resized_image = image.resize(size, Resampling.BILINEAR, box=box)
        pixels = np.asarray(resized_image, dtype=np.float32)  # [height, width, 3], in 0..255
        pixels = (pixels / np.float32(255) - self._mean) / self._std
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _readable_image(self, index: int) -> tuple[Any, int]:
        """Return the image and its class; with on_error=skip, of the next readable image. Raises UserError."""
        reason = ""
        indices_from_here = itertools.chain(range(index, len(self)), range(index))
        for candidate in indices_from_here:
            path = os.fsdecode(self._files[candidate])
            try:
                return read(path), int(self.targets[candidate])
            except MemoryError:
                raise
            except Exception as error:  # decoders also raise SyntaxError, struct.error, EOFError and others
                reason = f"{path} cannot be read as an image ({type(error).__name__}: {error})"
            if self.on_error == "stop":
                raise UserError(
                    f"data.on_error=stop: {reason}; repair or remove the file, or use data.on_error=skip, which takes "
                    "the next image in its place"
                )

            # Each file is named once per run, not in every epoch.
            if not self._is_named[candidate]:
                self._is_named[candidate] = 1
                skipped = int(self._is_named.sum())
                log.warning("data.on_error=skip: %s; the next image takes its place (%d so far)", reason, skipped)
        raise UserError(f"data.path={self.path}: none of the {len(self)} images can be read; the last one: {reason}")


# --- decoding and cropping


def read(path: str) -> Any:
    """Read the image at `path` as a PIL image of mode RGB, upright. The first, if a file has several.

    Transparent images are put on white; 16-bit images keep their upper 8 bits. Raises ValueError for pixels without a
    standard range (floats, 32-bit integers), and a decoder's many errors for a damaged file.
    """
    from PIL import Image, ImageOps  # late: only this data set needs it

    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
    if image.mode in ("F", "I"):
        raise ValueError("its pixels have no standard range; convert it to 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits
        upper_bits = np.asarray(image) >> 8
        image = Image.fromarray(upper_bits.astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image)
    return image.convert("RGB")


def random_box(width: int, height: int, scale: tuple[float, float]) -> Box:
    """Return a crop of random area and aspect ratio; the central one if ten draws do not fit the image.

    Args:
        width: of the image, in pixels.
        height: of the image, in pixels.
        scale: smallest and largest fraction of the area.
    """
    smallest_log_ratio, largest_log_ratio = np.log(RATIO)
    for _ in range(10):
        # The ratio is drawn on a logarithmic scale, so that wide and tall crops are equally likely.
        area = width * height * np.random.uniform(*scale)
        log_ratio = np.random.uniform(smallest_log_ratio, largest_log_ratio)
        ratio = math.exp(log_ratio)
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))

        # A crop that fits may lie anywhere.
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = np.random.randint(width - crop_width + 1)
            top = np.random.randint(height - crop_height + 1)
            return left, top, left + crop_width, top + crop_height
    return center_box(width, height, 1.0)


def center_box(width: int, height: int, share: float = CENTER) -> Box:
    """Return the central square, with this fraction of the shorter side."""
    side = max(1, round(share * min(width, height)))
    left = (width - side) // 2
    top = (height - side) // 2
    return left, top, left + side, top + side
