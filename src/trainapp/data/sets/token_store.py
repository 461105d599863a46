"""Documents as tokens in memory-mapped files of the cache directory: a corpus need not fit in memory, and is read and
tokenised once. A flat file rather than an Arrow table, so that windows may cross documents without a copy.
"""

import glob
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainapp.errors import UserError
from trainapp.files import publish, temporary_file, user_cache_dir

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """Documents of tokens, one after the other in `tokens` [N]; i is `tokens[offsets[i] : offsets[i + 1]]`."""

    tokens: np.ndarray
    offsets: np.ndarray  # int64 [documents + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def document(self, index: int) -> np.ndarray:
        """The tokens of one, [n]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def cache_directory(setting: str | None) -> Path:
    """`data.cache_dir`, or the user's."""
    return user_cache_dir() if setting is None else Path(setting).expanduser()


def key_of(*parts: Any) -> str:
    """A name for what these plain values decide."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()


def token_store(directory: Path, key: str, documents: Callable[[], Iterable[Any]], dtype: Any = np.int32) -> TokenStore:
    """The documents under this key: those of an earlier run, or read now and kept. In memory where the directory cannot
    be written.

    Several processes may do this at once: each writes files of its own, and renames them.
    """
    tokens, offsets = directory / f"tokens-{key}.bin", directory / f"tokens-{key}.npy"
    try:
        if not offsets.is_file():  # the last to be written
            _write(tokens, offsets, documents(), dtype)
        ends = np.load(offsets)
        if not ends[-1]:  # an empty file cannot be mapped
            return TokenStore(np.empty(0, dtype), ends)
        return TokenStore(np.memmap(tokens, dtype, "r", shape=(int(ends[-1]),)), ends)
    except OSError as error:
        log.warning(
            "cannot use the cache directory %s (%s): holding the text in memory; set data.cache_dir or TRAINAPP_CACHE "
            "to a directory that can be written",
            directory,
            error,
        )
    arrays = [np.asarray(document, dtype) for document in documents()]
    return TokenStore(np.concatenate([np.empty(0, dtype), *arrays]), np.cumsum([0, *map(len, arrays)], dtype=np.int64))


def _write(tokens: Path, offsets: Path, documents: Iterable[Any], dtype: Any) -> None:
    tokens.parent.mkdir(parents=True, exist_ok=True)
    lengths = [0]
    with temporary_file(tokens.parent, "wb") as file:
        for document in documents:
            lengths.append(len(document))
            file.write(np.asarray(document, dtype).tobytes())
        publish(file, tokens, sync=True)
    with temporary_file(tokens.parent, "wb") as file:
        np.save(file, np.cumsum(lengths, dtype=np.int64))
        publish(file, offsets, sync=True)


def find_files(files: str | Sequence[str]) -> list[str]:
    """The files that `data.files` names, each once: in the order given, the matches of a glob sorted.

    Raises UserError for a missing file, a directory, and a glob that matches nothing.
    """
    found: dict[str, None] = {}
    for entry in [files] if isinstance(files, str) else files:
        path = os.path.expanduser(entry)
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        if os.path.isdir(path):
            raise UserError(f"data.files={entry}: is a directory; name its files, as in {entry}/**/*.txt")
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            raise UserError(f"data.files={entry}: there is no such file, searched from {os.getcwd()}")
        found.update(dict.fromkeys(matches))
    if not found:
        raise UserError("data.files=[]: names no file; give paths or globs")
    return list(found)


def stamps(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """Path, size and time of each file: what decides whether it is read again."""
    return [(os.path.abspath(path), *_stamp(path)) for path in paths]


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(
            f"data.files={path}: cannot be read ({error.strerror}); make it readable or leave it out"
        ) from None
    return status.st_size, status.st_mtime_ns
