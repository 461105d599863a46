"""Documents as tokens in memory-mapped files of the cache directory, and text files as bytes, `data=text`."""

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from trainapp.data.sets.batched import Windows
from trainapp.errors import UserError
from trainapp.files import publish, temporary_file, user_cache_dir
from trainapp.validation import Fraction, PositiveInt, Str

CHUNK = 1 << 20  # bytes read at a time
log = logging.getLogger(__name__)


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

    def __init__(
        self,
        split: Literal["train", "val"],
        files: Str | list[Str] | None = None,
        context_length: PositiveInt = 128,
        val_fraction: Fraction = 0.1,
        cache_dir: Str | None = None,
    ):
        if files is None:
            files = os.path.join(glob.escape(sysconfig.get_path("stdlib")), "*.py")
        paths = find_files(files)
        key = key_of("text", stamps(paths))
        text = token_store(cache_directory(cache_dir), key, lambda: _chunks(paths), np.uint8).tokens
        border = len(text) - int(len(text) * val_fraction)
        part = text[border:] if split == "val" else text[:border]
        super().__init__(part, context_length, vocab_size=256)
        if not len(self):
            raise UserError(
                f"data.files={files}: {len(text)} bytes, of which data.val_fraction={val_fraction} leaves {len(part)} "
                f"for the {split} split; one window of data.context_length={context_length} needs "
                f"{context_length + 1}: give more text, a shorter context or another fraction"
            )

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
            raise _unreadable(path, error) from error


# --- the files of `data.files`


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
    """Path, size and time of each file: what decides whether it is read again. Raises UserError for a missing one."""
    try:
        status = [os.stat(path) for path in paths]
    except OSError as error:
        raise _unreadable(error.filename, error) from None
    return [(os.path.abspath(path), own.st_size, own.st_mtime_ns) for path, own in zip(paths, status, strict=True)]


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"data.files={path}: cannot be read ({error.strerror}); make it readable or leave it out")


# --- the cache of tokens


class TokenStore(NamedTuple):
    """Documents of tokens, one after the other in `tokens` [N]; i is `tokens[offsets[i] : offsets[i + 1]]`.

    offsets: int64 [documents + 1].
    """

    tokens: np.ndarray
    offsets: np.ndarray

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

    A corpus need not fit in memory, and is tokenised once. A flat file rather than an Arrow table, so that windows may
    cross documents without a copy. Several processes may do this at once: each writes files of its own, and renames
    them.
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
