"""Folders of small images, which tests write for themselves."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 60, 200), "green": (50, 190, 60), "red": (210, 50, 40)}


def image(colour, size=(12, 10), seed=0):
    """A PIL image of this colour with noise, so that no two crops are the same."""
    noise = np.random.default_rng(seed).integers(-40, 40, (size[1], size[0], 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def fill(folder: Path, images: int = 4, suffix: str = "png", first: int = 0) -> Path:
    """Class folders of as many images each. Returns the folder."""
    for number, (name, colour) in enumerate(COLOURS.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(first, first + images):
            image(colour, seed=100 * number + index).save(folder / name / f"{index}.{suffix}")
    return folder


def splits(folder: Path, train: int = 8, val: int = 4) -> Path:
    """A folder with train/ and val/: PNG and JPEG. Returns it."""
    fill(folder / "train", train // 2)
    fill(folder / "train", train - train // 2, "jpg", train // 2)
    fill(folder / "val", val, "jpg", train)
    return folder
