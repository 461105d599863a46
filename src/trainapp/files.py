"""Writing files so that readers see the old content or the new one, never a part of it."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def atomic_write(path: Path, mode: str = "w", sync: bool = False) -> Iterator[IO[Any]]:
    """Yields a new file that replaces `path` when the block ends; after an error in the block `path` is as before.

    Several processes may write the same path at once: each has its own temporary file, and the last rename wins.
    A process that is killed inside the block leaves a file named `.tmp-*` next to `path`.

    mode: "w" or "wb". sync: as in `publish`. Raises OSError when the file cannot be written.
    """
    with temporary_file(path.parent, mode) as file:
        yield file
        publish(file, path, sync)


@contextlib.contextmanager
def temporary_file(directory: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yields a new file in `directory`, removed at the end unless `publish` gave it a name."""
    path = directory / f".tmp-{uuid.uuid4().hex}"
    try:
        with open(path, mode.replace("w", "x")) as file:
            yield file
    finally:
        path.unlink(missing_ok=True)


def publish(file: IO[Any], path: Path, sync: bool = False) -> None:
    """Close a temporary file and rename it to `path`, which must be in the same directory.

    sync: survive a power cut: waits for the disk, typically a few milliseconds.
    """
    file.flush()
    if sync:
        os.fsync(file.fileno())
    file.close()  # before the rename: a network file system may report a full disk only now
    os.replace(file.name, path)
    if sync:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
