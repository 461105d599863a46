"""Text files as byte tokens, for next-token prediction."""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainapp.data.sets.batched import Windows
from trainapp.data.sets.token_store import cache_directory, find_files, key_of, stamps, token_store
from trainapp.errors import UserError
from trainapp.validation import Fraction, PositiveInt, Str

CHUNK = 1 << 20  # bytes read at a time


class Text(Windows):
    """Windows of bytes: inputs int64 [B, context_length], targets the same shifted by one byte; 256 tokens.

    files: a path or glob (`**` goes into subdirectories) or a list of them, relative to the working directory;
        None is the Python standard library's own top-level modules, so that there is text on every machine
        (it differs between versions of Python). They are joined in the order given, a glob's matches sorted.
    val_fraction: the end of the joined text that is for validation; no window crosses the border.
    cache_dir: where the joined text is stored and memory-mapped; see `files.user_cache_dir` for the default.

    Raises UserError for a path that is missing, unreadable or a directory, a glob without a match, and for
    text too short for one window of each split's `context_length` + 1 bytes.
    """

    task = "next_token"

    def __init__(
        self,
        split: Literal["train", "val"],
        files: Str | list[Str] | None = None,
        context_length: PositiveInt = 128,
        val_fraction: Fraction = 0.1,
        cache_dir: Str | None = None,
    ):
        self.spec: dict[str, Any] = {"vocab_size": 256, "context_length": context_length}
        if files is None:
            files = os.path.join(glob.escape(sysconfig.get_path("stdlib")), "*.py")
        paths = find_files(files)
        key = key_of("text", stamps(paths))
        text = token_store(cache_directory(cache_dir), key, lambda: _chunks(paths), np.uint8).tokens
        border = len(text) - int(len(text) * val_fraction)
        part, needed = text[border:] if split == "val" else text[:border], context_length + 1
        if len(part) < needed:
            raise UserError(
                f"data.files={files}: {len(text)} bytes, of which data.val_fraction={val_fraction} leaves {len(part)} "
                f"for the {split} split; one window of data.context_length={context_length} needs {needed}: give more "
                "text, a shorter context or another fraction"
            )
        # [len(self), context_length + 1]: the last target of a window is the first input of the next.
        self._windows = sliding_window_view(part, needed)[::context_length]

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these bytes; what is not UTF-8 becomes U+FFFD."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens).decode(errors="replace")


def _chunks(paths: Sequence[str]) -> Iterator[np.ndarray]:
    for path in paths:
        try:
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    yield np.frombuffer(chunk, np.uint8)
        except OSError as error:
            raise UserError(
                f"data.files={path}: cannot be read ({error.strerror}); make it readable or leave it out"
            ) from error
