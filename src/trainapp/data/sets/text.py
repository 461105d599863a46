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

    files: paths and globs, relative to the working directory; None: the top-level modules of Python's standard library.
    Files are joined in the order given, a glob's matches sorted: several in memory, a single file is memory-mapped. No
    window crosses the border to the validation text, at the end.

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
        text = joined(find_files(files))
        border = len(text) - int(len(text) * val_fraction)
        part, needed = text[border:] if split == "val" else text[:border], context_length + 1
        if len(part) < needed:
            raise UserError(
                f"data.files={files}: {len(text)} bytes, of which data.val_fraction={val_fraction} leaves {len(part)} "
                f"for the {split} split; one window of data.context_length={context_length} needs {needed}: give more "
                "text, a shorter context or another fraction"
            )
        # Nothing is copied: the last target of a window is the first input of the next.
        self._windows = sliding_window_view(part, needed)[::context_length]
        self.spec: dict[str, Any] = {"vocab_size": 256, "context_length": context_length}

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        windows = torch.from_numpy(self._windows[self._positions(indices)].astype(np.int64))
        return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}

    def encode(self, text: str) -> list[int]:
        """The text's bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


def find_files(files: str | Sequence[str]) -> list[str]:
    """The files that `data.files` names, each once: in the order given, the matches of a glob sorted.

    Raises UserError for a missing file, a directory, and a glob that matches nothing.
    """
    found: dict[str, None] = {}
    for entry in [files] if isinstance(files, str) else files:
        path = os.path.expanduser(entry)
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            raise UserError(
                f"data.files={entry}: names no file, searched from {os.getcwd()}; those of a folder are FOLDER/**/*.txt"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def joined(paths: Sequence[str]) -> np.ndarray:
    """The bytes of the files, uint8 [N]. Raises UserError for one that cannot be read."""
    try:  # an empty file cannot be mapped
        parts = [np.memmap(path, np.uint8, "r") for path in paths if os.path.getsize(path)]
    except OSError as error:
        raise UserError(
            f"data.files={error.filename}: cannot be read ({error.strerror}); make it readable or leave it out"
        ) from None
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
