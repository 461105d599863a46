"""The images below class folders: FOLDER/train/cat/1.jpg and FOLDER/val/dog/a/2.png, or FOLDER/cat/1.jpg."""

import hashlib
import itertools
import logging
import os
from collections.abc import Sequence

import numpy as np

from trainapp.errors import UserError
from trainapp.units import listed

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
SPLITS = {"train", "val", "validation", "test"}  # folders that are not classes


def find_images(
    path: str, split: str, val_fraction: float, split_seed: int, classes: Sequence[str] | None
) -> tuple[list[str], list[str], np.ndarray]:
    """Return the images of one split, ordered by class and then by name: class names, paths, and labels int64 [N].

    See `data.sets.images.Images` for the arguments. Raises UserError for a folder that is missing or does not consist
    of class folders with images, OSError for an unreadable one.
    """
    root = os.path.expanduser(path)
    if not os.path.isdir(root):
        raise UserError(
            f"data.path={path}: there is no such folder, searched from {os.getcwd()}; name the one that holds the "
            "class folders"
        )

    # The classes are those of the training images.
    training, validation = _split_folders(root, path)
    folder = validation if split == "val" and validation is not None else training
    names = _class_names(path, training, classes)
    unknown = sorted(set(_folders_in(folder)) - set(names))
    if unknown and classes is None:
        verb = "are" if len(unknown) > 1 else "is"
        raise UserError(
            f"data.path={path}: {listed(unknown)} of {folder} {verb} unknown to the training images, whose classes are "
            f"{listed(names)}; rename or remove folders that are no class"
        )

    # Only a separate validation folder may lack images of a class.
    files_by_class = [_images_in(os.path.join(folder, name)) for name in names]
    empty = [name for name, files in zip(names, files_by_class, strict=True) if not files]
    both_splits_share_folder = validation is None
    if empty and (both_splits_share_folder or split == "train"):
        raise UserError(
            f"data.path={path}: no images in the class folders {listed(empty)} of {folder}; remove them, or add files "
            f"that end in one of {', '.join(SUFFIXES)}"
        )
    if both_splits_share_folder:
        files_by_class = [_files_of_split(files, folder, split, val_fraction, split_seed) for files in files_by_class]

    class_sizes = [len(files) for files in files_by_class]
    labels = np.repeat(np.arange(len(names)), class_sizes)
    all_files = list(itertools.chain.from_iterable(files_by_class))
    return names, all_files, labels


def _split_folders(root: str, path: str) -> tuple[str, str | None]:
    """Return the folders that hold the class folders for training and for validation; None for the latter if the
    training folder holds both. path: `data.path`, for warnings.
    """
    folders = set(_folders_in(root))
    training = os.path.join(root, "train")
    # A folder train/ without class folders, beside folders that are no splits, is a class like the others.
    has_splits = "train" in folders and (folders <= SPLITS or len(_folders_in(training)) > 0)
    if not has_splits:
        if folders & (SPLITS - {"test"}):
            log.warning(
                "data.path=%s: %s are taken for classes, since there is no train/", path, listed(sorted(folders))
            )
        return root, None

    # The classes lie below the splits' folders.
    ignored = sorted(folders - SPLITS)
    if ignored:
        log.warning("data.path=%s: the classes are those of train/; %s beside it are ignored", path, listed(ignored))
    for name in ("val", "validation"):
        if name in folders:
            return training, os.path.join(root, name)
    return training, None


def _class_names(path: str, training: str, classes: Sequence[str] | None) -> list[str]:
    """Return the names of the class folders, or those that `data.classes` chooses."""
    class_folders = _folders_in(training)
    if not class_folders:
        raise UserError(
            f"data.path={path}: {training} has no folders; each class needs one with its images, as in "
            f"{training}/cat/1.jpg"
        )
    if classes is None:
        return class_folders
    names = list(classes)
    has_duplicates = len(set(names)) < len(names)
    if not names or has_duplicates or not set(names) <= set(class_folders):
        raise UserError(f"data.classes={names}: must name folders of {training}, each once: {listed(class_folders)}")
    return names


def _folders_in(folder: str) -> list[str]:
    """Return the names of a folder's subfolders, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
        return sorted(entry.name for entry in visible if entry.is_dir())


def _images_in(folder: str) -> list[str]:
    """Return the paths of the images in a class folder at any depth, sorted. Follows links. Empty if the folder is
    missing.
    """
    if not os.path.isdir(folder):
        return []
    paths = []
    for parent, subfolders, files in os.walk(folder, followlinks=True, onerror=_raise_error):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))  # those that are walked next
        for name in files:
            is_image = name.lower().endswith(SUFFIXES)
            if is_image and not name.startswith("."):
                paths.append(os.path.join(parent, name))
    return sorted(paths)


def _raise_error(error: OSError) -> None:
    """Raise the error, so that os.walk does not skip the folder."""
    raise error


def _files_of_split(files: list[str], root: str, split: str, fraction: float, seed: int) -> list[str]:
    """Return the files of a class that belong to a split, sorted.

    Chosen by a hash of their names: the split depends neither on the training's seed nor on the directory's order, and
    hardly changes when images are added. A class keeps at least one image for training unless all are held out.
    """
    held_out = round(len(files) * fraction)
    if fraction < 1:
        held_out = min(held_out, len(files) - 1)

    def hash_of(path: str) -> bytes:
        name = f"{seed}/{os.path.relpath(path, root)}"
        return hashlib.blake2b(name.encode(errors="surrogateescape")).digest()

    shuffled = sorted(files, key=hash_of)
    if split == "val":
        return sorted(shuffled[:held_out])
    return sorted(shuffled[held_out:])
