"""Text files as bytes: `data=text`."""

import glob
import os
import sysconfig
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from trainapp.data.loader import BatchedDataset
from trainapp.errors import UserError
from trainapp.validation import Fraction, PositiveInt, Str


class Text(BatchedDataset):
    """Windows of bytes: inputs int64 [B, context_length], targets the same shifted by one byte; 256 tokens.

    Files are joined in the order given, a glob's matches sorted: several in memory, a single file is memory-mapped. No
    window crosses the border to the validation text, at the end.

    Args:
        split: the beginning of the text, or its end.
        files: paths and globs, relative to the working directory; None: the top-level modules of Python's standard
            library.
        context_length: bytes in a window.
        val_fraction: the validation text's part of all text.

    Raises UserError for a path that names no readable file, and for text too short for one window of each split.
    """

    task = "next_token"

    def __init__(
        self,
        split: Literal["train", "val"],
        files: Str | list[Str] | None = None,
        context_length: PositiveInt = 128,
        val_fraction: Fraction = 0.1,
    ):
        if files is None:
            files = os.path.join(glob.escape(sysconfig.get_path("stdlib")), "*.py")
        text = read_bytes(find_files(files))

        # The end of the text is for validation.
        border = len(text) - int(len(text) * val_fraction)
        split_text = text[border:] if split == "val" else text[:border]
        window = context_length + 1  # with the last target
        if len(split_text) < window:
            raise UserError(
                f"data.files={files}: {len(text)} bytes, of which data.val_fraction={val_fraction} leaves "
                f"{len(split_text)} for the {split} split; one window of data.context_length={context_length} needs "
                f"{window}: give more text, a shorter context or another fraction"
            )

        # Nothing is copied: the last target of a window is the first input of the next.
        self._windows = sliding_window_view(split_text, window)[::context_length]
        self.spec: dict[str, Any] = {"vocab_size": 256, "context_length": context_length}

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        positions = self._positions(indices)
        windows = torch.from_numpy(self._windows[positions].astype(np.int64))
        return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}

    def encode(self, text: str) -> list[int]:
        """Return the text's bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


def find_files(files: str | Sequence[str]) -> list[str]:
    """Return the files that `data.files` names, each once: in the order given, the matches of a glob sorted.

    Raises UserError for a missing file, a directory, and a glob that matches nothing.
    """
    patterns = [files] if isinstance(files, str) else files
    paths: list[str] = []
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        matches = [path]
        if not os.path.exists(path):  # a file's name may have a glob's characters
            matches = sorted(glob.glob(path, recursive=True))
        matching_files = [match for match in matches if not os.path.isdir(match)]
        if not matching_files:
            raise UserError(
                f"data.files={pattern}: names no file, searched from {os.getcwd()}; those of a folder are "
                "FOLDER/**/*.txt"
            )
        paths.extend(matching_files)
    return list(dict.fromkeys(paths))


def read_bytes(paths: Sequence[str]) -> np.ndarray:
    """Return the bytes of the files, uint8 [N]. Raises UserError for one that cannot be read."""
    try:
        not_empty = [path for path in paths if os.path.getsize(path)]  # an empty file cannot be mapped
        texts = [np.memmap(path, np.uint8, "r") for path in not_empty]
    except OSError as error:
        raise UserError(
            f"data.files={error.filename}: cannot be read ({error.strerror}); make it readable or leave it out"
        ) from None
    if len(texts) == 1:
        return texts[0]
    return np.concatenate([np.empty(0, np.uint8), *texts])
