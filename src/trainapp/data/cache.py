"""Files that trainapp derives from the user's data and keeps for the next run."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainapp.errors import UserError
from trainapp.files import publish, temporary_file

CHUNK = 1 << 20  # bytes read at a time


def read_chunks(paths: Sequence[str]) -> Iterator[bytes]:
    """The files' bytes, one file after the other. Raises UserError for one that cannot be read."""
    for path in paths:
        try:
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except OSError as error:
            raise UserError(
                f"data.files={path}: cannot be read ({error.strerror}); make it readable or leave it out"
            ) from error


def concatenate(paths: Sequence[str], directory: Path) -> Path:
    """The cache file that holds the bytes of all `paths` in order; written only if it does not exist yet.

    It is named by the SHA-256 of its content, so changed files get a new one and equal content shares one.
    Several processes may do this at once: each writes a temporary file of its own, and the rename is atomic.
    Raises UserError for a source that cannot be read, OSError where the directory cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    for chunk in read_chunks(paths):
        digest.update(chunk)
        size += len(chunk)
    target = directory / f"text-{digest.hexdigest()}.bin"
    if target.is_file() and target.stat().st_size == size:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()  # once more: a source may have changed since it was first read
    with temporary_file(directory, "wb") as file:
        for chunk in read_chunks(paths):
            digest.update(chunk)
            file.write(chunk)
        target = directory / f"text-{digest.hexdigest()}.bin"
        publish(file, target, sync=True)
    return target
