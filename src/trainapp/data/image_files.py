"""Finds the images of class folders, quickly: a directory is read once, sorted, and no file is opened.

FOLDER/train/cat/1.jpg        or        FOLDER/cat/1.jpg
FOLDER/train/dog/a/2.png                FOLDER/dog/a/2.png
FOLDER/val/cat/3.jpg
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trainapp.errors import UserError
from trainapp.units import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
SPLITS = {"train": ("train",), "val": ("val", "validation"), "test": ("test",)}
log = logging.getLogger(__name__)


class Paths:
    """Many paths below one folder, in one block of bytes: loader processes share it, where reading a list of strings
    would copy it, and a process that is started anew receives it at once.
    """

    def __init__(self, root: str, relative: Sequence[str]):
        encoded = [os.fsencode(path) for path in relative]
        self.root = root
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        start, end = self._ends[index : index + 2]
        return os.path.join(self.root, os.fsdecode(self._bytes[start:end]))


class ImageFiles(NamedTuple):
    """The images of a split. labels: int64 [N], positions in `class_names`."""

    class_names: list[str]
    paths: Paths
    labels: np.ndarray


def find(path: str, split: str, val_fraction: float, split_seed: int, classes: Sequence[str] | None) -> ImageFiles:
    """The images of one split, ordered by class and then by name; see `data.images.Images` for the arguments.

    Raises UserError for a folder that is missing, unreadable, or not made of class folders with images.
    """
    root = os.path.expanduser(path)
    if not os.path.isdir(root):
        what = "is not a folder" if os.path.exists(root) else f"there is no such folder, searched from {os.getcwd()}"
        raise UserError(f"data.path={path}: {what}; name the one that holds the class folders")
    folders = _split_folders(path, root)
    folder = folders.get(split, folders["train"])
    names = _class_names(path, folders["train"], classes)
    if folder != folders["train"]:
        _require_known_classes(path, folder, names, classes)
    divides = "val" not in folders
    found: list[str] = []
    labels: list[int] = []
    ignored: list[str] = []
    empty: list[str] = []
    for label, name in enumerate(names):
        own = sorted(_images_in(path, os.path.join(folder, name), name, ignored))
        if not own and (divides or split == "train"):
            empty.append(name)
        if divides:
            own = _part(own, split, val_fraction, split_seed)
        found += own
        labels += [label] * len(own)
    if empty:
        raise UserError(
            f"data.path={path}: no images in the class folder{'s' * (len(empty) > 1)} {listed(empty)} of {folder}; "
            f"remove {'them' if len(empty) > 1 else 'it'}, or add files that end in one of {', '.join(SUFFIXES)}"
        )
    if ignored and split == "train":
        log.info("data.path=%s: ignored %d files that are no images, such as %s", path, len(ignored), ignored[0])
    return ImageFiles(names, Paths(folder, found), np.asarray(labels, dtype=np.int64))


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
    found = sorted(_folders_in(path, folder))
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


def _require_known_classes(path: str, folder: str, names: list[str], classes: Sequence[str] | None) -> None:
    unknown = sorted(set(_folders_in(path, folder)) - set(names))
    if unknown and classes is None:
        raise UserError(
            f"data.path={path}: the class{'es' * (len(unknown) > 1)} {listed(unknown)} of {folder} "
            f"{'are' if len(unknown) > 1 else 'is'} unknown to the training images, whose classes are {listed(names)}; "
            "rename or remove the folder"
        )


def _folders_in(path: str, folder: str) -> Iterator[str]:
    return (entry.name for entry in _entries(path, folder) if _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _entries(path: str, folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, but for hidden files."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(
            f"data.path={path}: the folder {folder} cannot be read ({error.strerror}); make it readable or remove it"
        ) from error


def _images_in(
    path: str, folder: str, relative: str, ignored: list[str], within: tuple[tuple[int, int], ...] = ()
) -> Iterator[str]:
    """Paths below the class folder at any depth, relative to the folder of the split. Links are followed.

    within: the folders around this one, as links may lead back to one of them.
    """
    if not within and not os.path.isdir(folder):
        return  # a class without validation images
    stat = os.stat(folder)
    here = (stat.st_dev, stat.st_ino)
    if here in within:
        return
    for entry in _entries(path, folder):
        name = f"{relative}/{entry.name}"
        if _is_folder(entry):
            yield from _images_in(path, entry.path, name, ignored, (*within, here))
        elif entry.name.lower().endswith(SUFFIXES):
            yield name
        else:
            ignored.append(name)


def _part(files: list[str], split: str, fraction: float, seed: int) -> list[str]:
    """Those of a class's files that belong to a split, sorted.

    By a hash of their names: which images are held out depends neither on the seed of the training nor on the order of
    a directory, and hardly changes when images are added. A class keeps at least one for training unless all are to be
    held out.
    """
    held_out = round(len(files) * fraction)
    if fraction < 1:
        held_out = min(held_out, len(files) - 1)
    ranked = sorted(files, key=lambda name: hashlib.blake2b(f"{seed}/{name}".encode(errors="surrogateescape")).digest())
    return sorted(ranked[:held_out] if split == "val" else ranked[held_out:])
