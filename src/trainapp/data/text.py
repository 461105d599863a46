"""Text files as byte tokens, for next-token prediction."""

import glob
import logging
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainapp.config.validation import Fraction, PositiveInt, Str
from trainapp.data import cache
from trainapp.data.batched import Windows
from trainapp.errors import UserError
from trainapp.paths import user_cache_dir

log = logging.getLogger(__name__)


class Text(Windows):
    """Windows of bytes: inputs int64 [B, context_length], targets the same shifted by one byte; 256 tokens.

    files: a path or glob (`**` goes into subdirectories) or a list of them, relative to the working directory;
        None is the Python standard library's own top-level modules, so that there is text on every machine
        (it differs between versions of Python). They are joined in the order given, a glob's matches sorted.
    val_fraction: the end of the joined text that is for validation; no window crosses the border.
    cache_dir: where the joined text is stored and memory-mapped; see `paths.user_cache_dir` for the default.
        Where it cannot be written, the text is held in memory.

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
        self.split = split
        self.context_length = context_length
        self.val_fraction = val_fraction
        self.files = files
        paths = _find(files)
        directory = user_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self._path: Path | None = None
        self._memory: np.ndarray | None = None
        try:
            self._path = cache.concatenate(paths, directory)
            self._open()
        except OSError as error:
            log.warning(
                "cannot use the cache directory %s (%s): holding the text in memory; "
                "set data.cache_dir or TRAINAPP_CACHE to a directory that can be written",
                directory,
                error,
            )
            self._path = None
            self._memory = np.frombuffer(b"".join(cache.read_chunks(paths)), dtype=np.uint8)
            self._open()

    def _open(self) -> None:
        text: np.ndarray
        if self._path is None:
            assert self._memory is not None, "neither a file nor its content"
            text = self._memory
        elif self._path.stat().st_size == 0:
            text = np.empty(0, dtype=np.uint8)  # an empty file cannot be mapped
        else:
            text = np.memmap(self._path, dtype=np.uint8, mode="r")
        border = len(text) - int(len(text) * self.val_fraction)
        part = text[border:] if self.split == "val" else text[:border]
        needed = self.context_length + 1
        if len(part) < needed:
            raise UserError(
                f"data.files={'null' if self.files is None else self.files}: {len(text)} bytes, of which "
                f"data.val_fraction={self.val_fraction} leaves {len(part)} for the {self.split} split; one window "
                f"of data.context_length={self.context_length} needs {needed}: "
                f"give more text, a shorter context or another fraction"
            )
        # [len(self), context_length + 1]: the last target of a window is the first input of the next.
        self._windows = sliding_window_view(part, needed)[:: self.context_length]

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped text: a loader worker maps the file again instead of receiving a copy."""
        return {key: value for key, value in self.__dict__.items() if key != "_windows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these bytes; what is not UTF-8 becomes U+FFFD."""
        return b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens).decode(errors="replace")


def _find(files: str | Sequence[str] | None) -> list[str]:
    """The files that `files` names, each once. Raises UserError for a missing one, a directory, an empty glob."""
    if files is None:
        # Escaped, because only the last part is a pattern.
        files = os.path.join(glob.escape(sysconfig.get_path("stdlib")), "*.py")
    found: dict[str, None] = {}
    for entry in [files] if isinstance(files, str) else files:
        path = os.path.expanduser(entry)
        if os.path.isdir(path):
            raise UserError(f"data.files={entry}: is a directory; name its files, as in {entry}/**/*.txt")
        if os.path.exists(path):
            found[path] = None
        elif any(character in path for character in "*?["):
            matches = [match for match in sorted(glob.glob(path, recursive=True)) if not os.path.isdir(match)]
            if not matches:
                raise UserError(f"data.files={entry}: matches no file, searched from {os.getcwd()}")
            found.update(dict.fromkeys(matches))
        else:
            raise UserError(f"data.files={entry}: there is no such file, searched from {os.getcwd()}")
    if not found:
        raise UserError("data.files=[]: names no file; give paths or globs, or null for Python's own sources")
    return list(found)
