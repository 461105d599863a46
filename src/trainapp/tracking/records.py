"""The files that a run's record goes to. A full disk costs lines of the record, not the run."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainapp import strict_json
from trainapp.torch_private import add_summary, guard_event_file

log = logging.getLogger(__name__)
Complain = Callable[[Path, Exception], None]


class Complaints:
    """Says once per file that it cannot be written."""

    def __init__(self) -> None:
        self._about: set[Path] = set()

    def __call__(self, path: Path, error: Exception) -> None:
        """path: the file, or the folder of several that are alike."""
        if path not in self._about:
            self._about.add(path)
            log.warning("%s cannot be written (%s); the run continues without what belongs there", path, error)


class JsonLines:
    """Appends lines to a file, each whole or not at all: what is written after an error does not join half a line."""

    def __init__(self, path: Path | None, complain: Complain):
        """path: None for one that has no lines."""
        self.path, self._complain = path, complain
        self._file: Any = None
        if path is not None:
            with self._errors():
                self._file = path.open("ab", buffering=0)

    def append(self, facts: Mapping[str, Any]) -> None:
        """Write one line. Each one is tried: there may be room again."""
        if self._file is None:
            return
        line = (strict_json.dumps(facts) + "\n").encode()
        with self._errors():
            end = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):  # a device has no end to cut
                    self._file.truncate(end)
                raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with self._errors():
                self._file.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            assert self.path is not None  # nothing is written elsewhere
            self._complain(self.path, error)


class Events:
    """TensorBoard's event file. After an error nothing more is written to it: the half-written event would hide it."""

    def __init__(self, folder: Path, purge_step: int | None, complain: Complain):
        # Late: importing TensorBoard takes 0.15 s.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            complain(folder, error)
        else:
            guard_event_file(self._writer, lambda error: complain(folder, error))

    def text(self, tag: str, text: str, step: int) -> None:
        """Add a text, which is shown as Markdown."""
        if self._writer is not None:
            self._writer.add_text(tag, text, step)

    def summary(self, values: Any, step: int) -> None:
        """Add Summary.Values as a single event: one each would fill the writer's queue of ten and make the loop wait
        for the disk.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is not None:
            add_summary(self._writer, Summary(value=values), step)

    def flush(self) -> None:
        """Write what is queued."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is queued, and end the writer's thread."""
        if self._writer is not None:
            self._writer.close()
