"""Finds the images of class folders: FOLDER/train/cat/1.jpg and FOLDER/val/dog/a/2.png, or FOLDER/cat/1.jpg."""

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainapp.errors import UserError
from trainapp.units import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
SPLITS = {"train": ("train",), "val": ("val", "validation"), "test": ("test",)}
log = logging.getLogger(__name__)


class ImageFiles(NamedTuple):
    """The images of a split. paths: bytes [N], one block of memory, which loader processes share, where a list of
    strings would be copied. labels: int64 [N], positions in `class_names`.
    """

    class_names: list[str]
    paths: np.ndarray
    labels: np.ndarray


def find(path: str, split: str, val_fraction: float, split_seed: int, classes: Sequence[str] | None) -> ImageFiles:
    """The images of one split, ordered by class and then by name; see `data.sets.images.Images` for the arguments.

    Raises UserError for a folder that is missing, unreadable, or not made of class folders with images.
    """
    root = os.path.expanduser(path)
    if not os.path.isdir(root):
        what = "is not a folder" if os.path.exists(root) else f"there is no such folder, searched from {os.getcwd()}"
        raise UserError(f"data.path={path}: {what}; name the one that holds the class folders")
    folders = _split_folders(path, root)
    folder, divides = folders.get(split, folders["train"]), "val" not in folders
    names = _class_names(path, folders["train"], classes)
    unknown = sorted(set(_folders_in(path, folder)) - set(names))
    if unknown and classes is None:
        raise UserError(
            f"data.path={path}: {listed(unknown)} of {folder} {'are' if len(unknown) > 1 else 'is'} unknown to the "
            f"training images, whose classes are {listed(names)}; rename or remove what is no class"
        )
    found: list[str] = []
    labels: list[int] = []
    empty: list[str] = []
    for label, name in enumerate(names):
        own = _images_in(path, os.path.join(folder, name))
        if not own and (divides or split == "train"):
            empty.append(name)
        if divides:
            own = _part(own, folder, split, val_fraction, split_seed)
        found += own
        labels += [label] * len(own)
    if empty:
        raise UserError(
            f"data.path={path}: no images in the class folders {listed(empty)} of {folder}; remove them, or add files "
            f"that end in one of {', '.join(SUFFIXES)}"
        )
    return ImageFiles(names, np.array(list(map(os.fsencode, found)), dtype=bytes), np.asarray(labels, dtype=np.int64))


def _split_folders(path: str, root: str) -> dict[str, str]:
    """The folders of the splits that exist. `train` is the root itself where it holds the classes directly: where there
    is a folder beside the splits that is none, `train` is a class like the others.
    """
    names = set(_folders_in(path, root))
    allowed = {name for of_split in SPLITS.values() for name in of_split}
    if "train" not in names or not names <= allowed:
        if {"train", "val", "validation"} & names:
            log.warning(
                "data.path=%s: %s are taken for classes, since a folder that is made of train/ and val/ has no other",
                path,
                listed(sorted(names)),
            )
        return {"train": root}
    return {
        split: os.path.join(root, next(name for name in of_split if name in names))
        for split, of_split in SPLITS.items()
        if names & set(of_split)
    }


def _class_names(path: str, folder: str, classes: Sequence[str] | None) -> list[str]:
    """Sorted, so that they do not depend on the file system; as in `classes`, where that is given."""
    found = _folders_in(path, folder)
    if classes is not None:
        missing = [name for name in classes if name not in found]
        if missing or len(set(classes)) < len(classes) or not classes:
            wrong = f"{folder} has no folder {listed(missing)}" if missing else "a name must be there, and each once"
            raise UserError(f"data.classes={list(classes)}: {wrong}; name folders among {listed(found)}")
        return list(classes)
    if not found:
        raise UserError(
            f"data.path={path}: {folder} has no folders; each class needs one with its images, as in {folder}/cat/1.jpg"
        )
    return found


def _folders_in(path: str, folder: str) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(
            f"data.path={path}: the folder {folder} cannot be read ({error.strerror}); make it readable or remove it"
        ) from error


def _images_in(path: str, folder: str) -> list[str]:
    """The paths of the images in a class folder at any depth, sorted. Links are followed."""

    def refuse(error: OSError) -> None:
        if error.filename != folder:  # else a class without validation images
            raise UserError(f"data.path={path}: the folder {error.filename} cannot be read ({error.strerror})")

    found: list[str] = []
    for inner, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += (os.path.join(inner, f) for f in files if f.lower().endswith(SUFFIXES) and not f.startswith("."))
    return sorted(found)


def _part(files: list[str], root: str, split: str, fraction: float, seed: int) -> list[str]:
    """Those of a class's files that belong to a split, sorted.

    By a hash of their names: which images are held out depends neither on the seed of the training nor on the order of
    a directory, and hardly changes when images are added. A class keeps at least one for training unless all are to be
    held out.
    """
    held_out = round(len(files) * fraction)
    if fraction < 1:
        held_out = min(held_out, len(files) - 1)

    def rank(path: str) -> bytes:
        name = f"{seed}/{os.path.relpath(path, root)}"
        return hashlib.blake2b(name.encode(errors="surrogateescape")).digest()

    ranked = sorted(files, key=rank)
    return sorted(ranked[:held_out] if split == "val" else ranked[held_out:])
