"""Pixels of an image file: decoding, cropping, and mixing two images. Random numbers come from the caller's generator.

Random resized crop: Szegedy et al., "Going Deeper with Convolutions" (arXiv:1409.4842). Mixup: Zhang et al.
(arXiv:1710.09412). CutMix: Yun et al. (arXiv:1905.04899).
"""

import errno
import math
from typing import Any

import numpy as np

RATIO = (3 / 4, 4 / 3)  # width to height of a random crop
CENTER = 0.875  # the share of the shorter side that evaluation sees: 224 of 256
ATTEMPTS = 10
# Of a file's own, and the same whenever it is read. Others, such as too many open files or a lost server, are the
# machine's: a run that left such files out would depend on them.
_OF_FILE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO)

Box = tuple[int, int, int, int]  # left, top, right, bottom


class UnreadableImage(Exception):
    """A file that cannot be decoded; the message is the reason."""


def read(path: str) -> Any:
    """The image at `path` as a PIL image of mode RGB, upright. The first one, of a file with several.

    Raises UnreadableImage for a file that is damaged, no image, missing or not to be read, and OSError for what is not
    the file's fault.
    """
    from PIL import Image, ImageOps  # late: only this data set needs it

    try:
        with Image.open(path) as image:
            image.load()
            # Older versions of Pillow have the 16 bits of a PNG in mode I.
            return to_rgb(ImageOps.exif_transpose(image), is_16_bit=image.format == "PNG")
    except MemoryError:
        raise
    except OSError as error:
        if error.errno is not None and error.errno not in _OF_FILE:
            raise
        reason = error.strerror or str(error).replace(f" {path!r}", "")
        raise UnreadableImage(reason) from None
    except Exception as error:  # decoders raise SyntaxError, struct.error, EOFError and others for damaged files
        raise UnreadableImage(f"{type(error).__name__}: {error}") from None


def to_rgb(image: Any, is_16_bit: bool = False) -> Any:
    """8 bits of red, green and blue. Transparent images are shown on white; of 16 bits the upper 8 are kept.

    is_16_bit: what integers of mode I are. Raises ValueError for pixels without an agreed range: floating-point
    numbers, and other integers of 32 bits.
    """
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of no agreed range; convert it to 8 or 16 bits")
    if image.mode == "I" and not is_16_bit:
        raise ValueError("its pixels are 32-bit integers of no agreed range; convert it to 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        grey = (values >> 8).astype(np.uint8)
        if isinstance(clear := image.info.get("transparency"), int):
            grey[values == clear] = 255
        image = Image.fromarray(grey)
    elif image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def random_box(rng: np.random.Generator, width: int, height: int, scale: tuple[float, float]) -> Box:
    """A crop of a random share of the area and a random shape; the central one if ten do not fit the image.

    scale: the smallest and the largest share.
    """
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = int(rng.integers(width - columns + 1)), int(rng.integers(height - rows + 1))
            return left, top, left + columns, top + rows
    return center_box(width, height, 1.0)


def center_box(width: int, height: int, share: float = CENTER) -> Box:
    """The central square, with this share of the shorter side."""
    side = max(1, round(share * min(width, height)))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def resized(image: Any, box: Box, size: int, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """The box of an RGB image as float32 [3, size, size], normalised. mean, std: of pixels in 0..1, float32 [3]."""
    from PIL.Image import Resampling

    pixels = np.asarray(image.resize((size, size), Resampling.BILINEAR, box=box), dtype=np.float32)
    pixels = (pixels / np.float32(255) - mean) / std
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def cut_box(rng: np.random.Generator, size: int, share: float) -> Box:
    """A square of this share of the area with its centre anywhere, clipped at the border."""
    side = size * math.sqrt(share)
    row, column = rng.uniform(0, size, 2)
    left, right = (int(np.clip(round(column + sign * side / 2), 0, size)) for sign in (-1, 1))
    top, bottom = (int(np.clip(round(row + sign * side / 2), 0, size)) for sign in (-1, 1))
    return left, top, right, bottom
