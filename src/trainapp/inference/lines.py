"""JSON lines that appear under their name when all of them are written.

Until then they are in NAME.partial, and NAME.partial.json says what they are of. Restarted after an error or a kill,
the same work resumes there: no line is lost or written twice. Different work starts a new file.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from trainapp import strict_json
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import atomic_write

_BEGINNING = b'{"index":'


class Lines:
    """An open file of lines, of which the first `done` are written. See `opened`."""

    def __init__(self, path: Path, setting: str, file: IO[bytes], done: int):
        self.path, self.done, self._setting, self._file = path, done, setting, file

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append a line for each row, with its number as `index`. Raises TrainingStopped when the disk is full."""
        numbered = ({"index": number} | row for number, row in enumerate(rows, start=self.done))
        content = memoryview("".join(strict_json.dumps(row) + "\n" for row in numbered).encode())
        try:
            while content:
                content = content[self._file.write(content) :]  # a full disk takes a part
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            raise TrainingStopped(
                f"{self._setting}={self.path}: cannot be written ({error.strerror}); {self.done} lines are in "
                f"{self._file.name}, and the same command continues there"
            ) from None
        self.done += len(rows)

    def sync(self) -> None:
        """Wait until the lines are on the disk, and others see them."""
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """The lines are in another file."""
        Path(self._file.name).unlink(missing_ok=True)
        _facts(self.path).unlink(missing_ok=True)

    def publish(self) -> None:
        """All lines are written: give the file its name, in place of an older one."""
        self.sync()
        os.replace(self._file.name, self.path)
        _facts(self.path).unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: Path, facts: dict[str, Any], setting: str) -> Iterator[Lines]:
    """The lines that an interrupted process has left for this file, ready for more, or none.

    facts: plain values that decide the lines; those of other facts are dropped. setting: which names the file, for
    messages. Raises UserError where it cannot be written, or another process is writing it.
    """
    wanted = strict_json.dumps(facts, sort_keys=True, default=str)
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what is written survives a kill.
            file = stack.enter_context(open(path.with_name(f"{path.name}.partial"), "ab", buffering=0))
            _lock(file, setting, path)
            done = _complete_lines(file) if _read(_facts(path)) == wanted else None
            if done is None:
                file.truncate(0)
                with atomic_write(_facts(path)) as note:  # after the old lines are gone
                    note.write(wanted)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            raise UserError(f"{setting}={path}: cannot be written ({error.strerror}); name another file") from None
        yield Lines(path, setting, file, done or 0)


def require_replaceable(path: Path, setting: str) -> None:
    """Raises UserError for a directory or a device, and for a file with other content than `Lines.write` writes."""
    if os.path.exists(path) and not os.path.isfile(path):  # those of Path raise where access is denied
        kind = "a directory" if os.path.isdir(path) else "no regular file"
        raise UserError(f"{setting}={path}: is {kind}; name a file")
    begins = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # `opened` will say what is wrong
        begins = file.read(len(_BEGINNING))
    if begins not in (b"", _BEGINNING):
        raise UserError(f"{setting}={path}: is there already, and is no file of predictions; name another file")


def _facts(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial.json")


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return None


def _lock(file: IO[bytes], setting: str, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise UserError(f"{setting}={path}: another process is writing it; wait, or name another file") from None
        # a file system without locks


def _complete_lines(file: IO[bytes]) -> int | None:
    """Cut off a line that a kill has left unfinished. Returns the number of lines, None for a damaged file."""
    count, end, last = 0, 0, b""
    with open(file.name, "rb") as written:
        for line in written:
            if line.endswith(b"\n"):
                count, end, last = count + 1, end + len(line), line
    file.truncate(end)
    try:
        return count if not count or json.loads(last)["index"] == count - 1 else None
    except (ValueError, KeyError, TypeError):
        return None
