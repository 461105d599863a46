"""Images in class folders, `data=images`: FOLDER/train/cat/1.jpg and FOLDER/val/dog/a/2.png, or FOLDER/cat/1.jpg.

Random resized crop: Szegedy et al., "Going Deeper with Convolutions" (arXiv:1409.4842). Mixup: Zhang et al.
(arXiv:1710.09412). CutMix: Yun et al. (arXiv:1905.04899).
"""

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from trainapp.errors import UserError
from trainapp.units import listed
from trainapp.validation import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Str

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
SPLITS = {"train", "val", "validation", "test"}  # folders that are not classes
RATIO = (3 / 4, 4 / 3)  # width to height of a random crop
CENTER = 0.875  # fraction of the shorter side used in evaluation: 224 of 256

Share = Annotated[float, Field(ge=0, le=1, strict=True)]
PositiveShare = Annotated[float, Field(gt=0, le=1, strict=True)]
Box = tuple[int, int, int, int]  # left, top, right, bottom


class Images(torch.utils.data.Dataset):
    """Images in class folders: inputs float32 [3, image_size, image_size], normalised; targets int64, the class.

    With mixup or cutmix, the targets of training are float32 [classes]: the share of each class. With both, each sample
    gets one of them. conf/data/images.yaml describes the arguments.

    path: a folder with train/ and val/ (or validation/), each with one folder per class; or with the class folders
    themselves. Images may lie at any depth below their class. Training uses a random crop of random size and shape,
    evaluation the central square with 7/8 of the shorter side. val_fraction: 1 for all of each class. classes: folders
    of other classes are ignored. on_error: skip uses the next readable image in name order: every batch keeps its size.

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
        self.class_names, files, self.targets = find(path, split, val_fraction, split_seed, classes)
        # One block of memory: reference counts would make each loader process copy a list of strings.
        self._files = np.array(list(map(os.fsencode, files)), dtype=bytes)
        self._named = torch.zeros(len(files), dtype=torch.uint8).share_memory_()  # files already named in a warning
        self.path, self.image_size, self.is_training, self.on_error = path, image_size, split == "train", on_error
        self.scale, self.flip, self.mixup, self.cutmix = (scale[0], scale[1]), flip, mixup, cutmix
        self._mean, self._std = np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32)
        self.spec: dict[str, Any] = {
            "image_shape": (3, image_size, image_size),
            "num_classes": len(self.class_names),
            "classes": self.class_names,
        }

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample. Raises IndexError beyond the data, and UserError for a file that cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample indices must lie in [0, {len(self)}), got {index}")
        pixels, label = self._view(index)
        if not self.is_training or not (self.mixup or self.cutmix):
            return {"inputs": torch.from_numpy(pixels), "targets": label}
        pixels, shares = self._mixed(pixels, label)
        return {"inputs": torch.from_numpy(pixels), "targets": torch.from_numpy(shares)}

    def _view(self, index: int) -> tuple[np.ndarray, int]:
        """A random crop, perhaps mirrored, and its class; in evaluation the centre."""
        image, label = self._readable(index)
        width, height = image.size
        if not self.is_training:
            return self._resized(image, center_box(width, height)), label
        pixels = self._resized(image, random_box(width, height, self.scale))
        if np.random.random() < self.flip:
            pixels = np.ascontiguousarray(pixels[..., ::-1])
        return pixels, label

    def _mixed(self, pixels: np.ndarray, label: int) -> tuple[np.ndarray, np.ndarray]:
        """The sample mixed with another image: `(pixels, shares of the classes)`."""
        cuts = bool(self.cutmix) and (not self.mixup or np.random.random() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        share = np.random.beta(alpha, alpha)  # the other image's share
        other, other_label = self._view(np.random.randint(len(self)))
        if cuts:
            # a square with this share of the area, centred anywhere and clipped at the border
            half, center = self.image_size * math.sqrt(share) / 2, np.random.uniform(0, self.image_size, 2)
            corners = np.round([center - half, center + half]).clip(0, self.image_size).astype(int)
            (left, top), (right, bottom) = corners
            pixels[:, top:bottom, left:right] = other[:, top:bottom, left:right]
            share = (right - left) * (bottom - top) / self.image_size**2
        else:
            pixels = np.float32(1 - share) * pixels + np.float32(share) * other
        shares = np.zeros(len(self.class_names), dtype=np.float32)
        shares[label] += 1 - share
        shares[other_label] += share
        return pixels, shares

    def _resized(self, image: Any, box: Box) -> np.ndarray:
        """The box of an RGB image as float32 [3, image_size, image_size], normalised."""
        from PIL.Image import Resampling

        size = (self.image_size, self.image_size)
        pixels = np.asarray(image.resize(size, Resampling.BILINEAR, box=box), dtype=np.float32)
        pixels = (pixels / np.float32(255) - self._mean) / self._std
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _readable(self, index: int) -> tuple[Any, int]:
        """The image and its class; with on_error=skip, of the next readable image. Raises UserError."""
        reason = ""
        for place in itertools.chain(range(index, len(self)), range(index)):
            path = os.fsdecode(self._files[place])
            try:
                return read(path), int(self.targets[place])
            except MemoryError:
                raise
            except Exception as error:  # decoders also raise SyntaxError, struct.error, EOFError and others
                reason = f"{path} cannot be read as an image ({type(error).__name__}: {error})"
            if self.on_error == "stop":
                raise UserError(
                    f"data.on_error=stop: {reason}; repair or remove the file, or use data.on_error=skip, which takes "
                    "the next image in its place"
                )
            if not self._named[place]:
                self._named[place] = 1
                left_out = int(self._named.sum())
                log.warning("data.on_error=skip: %s; the next image takes its place (%d so far)", reason, left_out)
        raise UserError(f"data.path={self.path}: none of the {len(self)} images can be read; the last one: {reason}")


# --- finding


def find(
    path: str, split: str, val_fraction: float, split_seed: int, classes: Sequence[str] | None
) -> tuple[list[str], list[str], np.ndarray]:
    """The images of one split, ordered by class and then by name: class names, paths, and labels int64 [N]. See
    `Images` for the arguments.

    Raises UserError for a folder that is missing or does not consist of class folders with images, OSError for an
    unreadable one.
    """
    root = os.path.expanduser(path)
    if not os.path.isdir(root):
        raise UserError(
            f"data.path={path}: there is no such folder, searched from {os.getcwd()}; name the one that holds the "
            "class folders"
        )
    training, validation, folders = root, None, set(_folders_in(root))
    inside = os.path.join(root, "train")
    if "train" in folders and (folders <= SPLITS or _folders_in(inside)):  # otherwise it is a class like the others
        training = inside
        validation = next((os.path.join(root, name) for name in ("val", "validation") if name in folders), None)
        if others := sorted(folders - SPLITS):
            log.warning("data.path=%s: the classes are those of train/; %s beside it are ignored", path, listed(others))
    elif folders & (SPLITS - {"test"}):
        log.warning("data.path=%s: %s are taken for classes, since there is no train/", path, listed(sorted(folders)))
    folder, divides = (validation or training) if split == "val" else training, validation is None
    found = _folders_in(training)
    names = found if classes is None else list(classes)
    if not found:
        raise UserError(
            f"data.path={path}: {training} has no folders; each class needs one with its images, as in "
            f"{training}/cat/1.jpg"
        )
    if not names or len(set(names)) < len(names) or not set(names) <= set(found):
        raise UserError(f"data.classes={names}: must name folders of {training}, each once: {listed(found)}")
    unknown = sorted(set(_folders_in(folder)) - set(names))
    if unknown and classes is None:
        raise UserError(
            f"data.path={path}: {listed(unknown)} of {folder} {'are' if len(unknown) > 1 else 'is'} unknown to the "
            f"training images, whose classes are {listed(names)}; rename or remove folders that are no class"
        )
    by_class = [_images_in(os.path.join(folder, name)) for name in names]
    empty = [name for name, own in zip(names, by_class, strict=True) if not own]
    if empty and (divides or split == "train"):
        raise UserError(
            f"data.path={path}: no images in the class folders {listed(empty)} of {folder}; remove them, or add files "
            f"that end in one of {', '.join(SUFFIXES)}"
        )
    if divides:
        by_class = [_part(own, folder, split, val_fraction, split_seed) for own in by_class]
    labels = np.repeat(np.arange(len(names)), [len(own) for own in by_class])
    return names, [file for own in by_class for file in own], labels


def _folders_in(folder: str) -> list[str]:
    """The names of a folder's subfolders, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images_in(folder: str) -> list[str]:
    """The paths of the images in a class folder at any depth, sorted. Follows links. Empty if the folder is missing."""

    def refuse(error: OSError) -> None:  # os.walk would skip the folder
        raise error

    found: list[str] = []
    for inner, folders, files in os.walk(folder, followlinks=True, onerror=refuse) if os.path.isdir(folder) else ():
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += (os.path.join(inner, f) for f in files if f.lower().endswith(SUFFIXES) and not f.startswith("."))
    return sorted(found)


def _part(files: list[str], root: str, split: str, fraction: float, seed: int) -> list[str]:
    """The files of a class that belong to a split, sorted.

    Chosen by a hash of their names: the split depends neither on the training's seed nor on the directory's order, and
    hardly changes when images are added. A class keeps at least one image for training unless all are held out.
    """
    held_out = round(len(files) * fraction)
    if fraction < 1:
        held_out = min(held_out, len(files) - 1)

    def rank(path: str) -> bytes:
        name = f"{seed}/{os.path.relpath(path, root)}"
        return hashlib.blake2b(name.encode(errors="surrogateescape")).digest()

    ranked = sorted(files, key=rank)
    return sorted(ranked[:held_out] if split == "val" else ranked[held_out:])


# --- decoding and cropping


def read(path: str) -> Any:
    """The image at `path` as a PIL image of mode RGB, upright. The first, if a file has several.

    Transparent images are put on white; 16-bit images keep their upper 8 bits. Raises ValueError for pixels without a
    standard range (floats, 32-bit integers), and a decoder's many errors for a damaged file.
    """
    from PIL import Image, ImageOps  # late: only this data set needs it

    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
    if image.mode in ("F", "I"):
        raise ValueError("its pixels have no standard range; convert it to 8 or 16 bits")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def random_box(width: int, height: int, scale: tuple[float, float]) -> Box:
    """A crop of random area and aspect ratio; the central one if ten draws do not fit the image.

    scale: smallest and largest fraction of the area.
    """
    for _ in range(10):
        area = width * height * np.random.uniform(*scale)
        ratio = math.exp(np.random.uniform(*np.log(RATIO)))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = np.random.randint(width - columns + 1), np.random.randint(height - rows + 1)
            return left, top, left + columns, top + rows
    return center_box(width, height, 1.0)


def center_box(width: int, height: int, share: float = CENTER) -> Box:
    """The central square, with this fraction of the shorter side."""
    side = max(1, round(share * min(width, height)))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
