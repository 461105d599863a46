"""Tokenised documents in files of their own, memory-mapped: a corpus need not fit in memory, and is tokenised once."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainapp.files import publish, temporary_file

Tokens = Sequence[int] | np.ndarray
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenStore:
    """Documents of tokens, one after the other in `tokens`, int32 [N]; i is `tokens[offsets[i] : offsets[i + 1]]`."""

    tokens: np.ndarray
    offsets: np.ndarray  # int64 [documents + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def document(self, index: int) -> np.ndarray:
        """The tokens of one, int32 [n]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def key_of(*parts: Any) -> str:
    """A name for what these plain values decide."""
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()


def token_store(directory: Path, key: str, documents: Callable[[], Iterable[Tokens]]) -> TokenStore:
    """The documents under this key: those of an earlier run, or tokenised now and kept. In memory where the directory
    cannot be written.

    Several processes may do this at once: each writes files of its own, and renames them.
    """
    tokens, offsets = directory / f"tokens-{key}.bin", directory / f"tokens-{key}.npy"
    try:
        if not offsets.is_file():  # the last to be written
            _write(tokens, offsets, documents())
        return _opened(tokens, offsets)
    except OSError as error:
        log.warning(
            "cannot use the cache directory %s (%s): holding the tokens in memory; set data.cache_dir or "
            "TRAINAPP_CACHE to a directory that can be written",
            directory,
            error,
        )
    arrays = [np.asarray(document, np.int32) for document in documents()]
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    return TokenStore(np.concatenate([np.empty(0, np.int32), *arrays]), ends)


def _write(tokens: Path, offsets: Path, documents: Iterable[Tokens]) -> None:
    tokens.parent.mkdir(parents=True, exist_ok=True)
    lengths = [0]
    with temporary_file(tokens.parent, "wb") as file:
        for document in documents:
            lengths.append(len(document))
            file.write(np.asarray(document, np.int32).tobytes())
        publish(file, tokens, sync=True)
    with temporary_file(tokens.parent, "wb") as file:
        np.save(file, np.cumsum(lengths, dtype=np.int64))
        publish(file, offsets, sync=True)


def _opened(tokens: Path, offsets: Path) -> TokenStore:
    ends = np.load(offsets)
    if not ends[-1]:  # an empty file cannot be mapped
        return TokenStore(np.empty(0, np.int32), ends)
    return TokenStore(np.memmap(tokens, np.int32, "r", shape=(int(ends[-1]),)), ends)
