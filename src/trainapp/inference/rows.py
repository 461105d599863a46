"""Rows of JSON, one per sample or prompt: predictions and generations are evaluations that write rows.

Until all of them are written they are in NAME.HASH.RANK_of_WORLD.partial, where HASH is that of what decides them. So
the same command continues there after an error or a kill, with any batch size, and no row is lost or written twice.
"""

import contextlib
import hashlib
import heapq
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.checkpoint.directory import resolve
from trainapp.config.schema import Config
from trainapp.data.batch import MicroBatch
from trainapp.errors import TrainingStopped, UserError
from trainapp.files import atomic_write, strict_json
from trainapp.parallel.ranks import Ranks, answered_by_rank_zero
from trainapp.training.allocations import note_refused
from trainapp.training.evaluate import as_evaluated, each_micro_batch
from trainapp.training.phase import Phase
from trainapp.training.session import Session

Row = dict[str, Any]
_BEGINNING = b'{"index":'  # of every file of rows


class Rows:
    """A rank's file of rows, open for more.

    done: rows that it has. index: the place of this rank's row of that number among those of all ranks. setting: names
    the file, for messages.
    """

    def __init__(self, path: Path, decides: Mapping[str, Any], ranks: Ranks, index: Callable[[int], int], setting: str):
        """decides: plain values; rows of others are not continued. Raises UserError where no file can be written."""
        self.path, self._ranks, self._index, self._setting = path, ranks, index, setting
        _require_replaceable(path, setting)
        text = strict_json([decides, ranks.world], sort_keys=True, default=str)
        name = f"{path.name}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self._parts = [path.with_name(f"{name}.{r}_of_{ranks.world}.partial") for r in range(ranks.world)]
        self.partial = self._parts[ranks.rank]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.partial, "ab", buffering=0)  # noqa: SIM115  # unbuffered: it survives a kill
        except OSError as error:
            raise UserError(f"{setting}={path}: cannot be written ({error.strerror}); name another file") from None
        whole = self.partial.read_bytes().rpartition(b"\n")[0]
        self._file.truncate(len(whole) + bool(whole))  # without the row that a kill has cut
        self.done = whole.count(b"\n") + bool(whole)

    def write(self, rows: Sequence[Row]) -> None:
        """Append a line for each. Raises TrainingStopped when the disk is full."""
        numbered = ({"index": self._index(number)} | row for number, row in enumerate(rows, start=self.done))
        content = memoryview("".join(strict_json(row, default=_plain) + "\n" for row in numbered).encode())
        try:
            while content:
                content = content[self._file.write(content) :]  # a full disk takes a part
        except OSError as error:
            raise self._stopped(error) from None
        self.done += len(rows)

    def publish(self) -> int:
        """All ranks have written their rows: give the file its name, in place of an older one. Collective.

        Returns the number of rows. Raises TrainingStopped, on all ranks, where rank 0 cannot write it.
        """
        os.fsync(self._file.fileno())
        counts = self._ranks.all_gather_object(self.done)
        answered_by_rank_zero(self._ranks, self._join)
        self.partial.unlink(missing_ok=True)
        return sum(counts)

    def _join(self) -> None:
        try:
            if len(self._parts) == 1:
                os.replace(self.partial, self.path)
                return
            with contextlib.ExitStack() as stack:
                parts = [stack.enter_context(open(part)) for part in self._parts]
                file = stack.enter_context(atomic_write(self.path, sync=True))
                file.writelines(heapq.merge(*parts, key=lambda line: json.loads(line)["index"]))
        except OSError as error:
            raise self._stopped(error) from None

    def _stopped(self, error: OSError) -> TrainingStopped:
        several = "; ranks on several nodes need a file system that all of them share" if len(self._parts) > 1 else ""
        return TrainingStopped(
            f"{self._setting}={self.path}: cannot be written ({error.filename or error.strerror}: {error.strerror}); "
            f"{self.done} rows are in {self.partial}, and the same command continues there{several}"
        )

    def close(self) -> None:
        """Close the file, which stays for the next process unless it is published."""
        self._file.close()


def _require_replaceable(path: Path, setting: str) -> None:
    """Raises UserError for anything but a file of rows: a slip must not cost data."""
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise UserError(f"{setting}={path}: is {'a directory' if path.is_dir() else 'no regular file'}; name a file")
    with open(path, "rb") as file:
        if file.read(len(_BEGINNING)) not in (b"", _BEGINNING):
            raise UserError(f"{setting}={path}: is there already, and is no file of rows; name another file")


def _plain(value: Any) -> Any:
    """What JSON has no form for."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} among predictions, which is no string, number, list or dict")


@contextlib.contextmanager
def opened(session: Session, name: str, index: Callable[[int], int] = int) -> Iterator[Rows]:
    """The rows of the run's mode, in the file that its section of the settings names, else `name` in the run directory.

    index: as for `Rows`.
    """
    mode, config = session.config.mode, session.config
    given = config.to_dict()[mode]["output"]
    path = Path(config.run_dir) / name if given is None else Path(os.path.expanduser(given)).resolve()
    with contextlib.closing(Rows(path, what_decides(config), session.ranks, index, f"{mode}.output")) as rows:
        yield rows


def what_decides(config: Config) -> dict[str, Any]:
    """What decides the output of a model, in plain values: checkpoint, data and numerics, as the settings name them."""
    checkpoint, settings = resolve(config.checkpointing.resume), config.to_dict()
    names = ("mode", "model", "adapter", "data", "eval", "task", "task_arguments", "precision")
    own = {name: value for name, value in settings[config.mode].items() if name not in ("output", "batch_size")}
    return {
        "checkpoint": [str(checkpoint.resolve()), checkpoint.stat().st_mtime_ns],
        "average": config.train.ema is not None,
        "own": own,
        **{name: settings[name] for name in names},
    }


def begin(session: Session) -> None:
    """What follows counts as an evaluation: where memory runs out, nothing needs to be undone."""
    session.attempt.phase, session.attempt.started = Phase.EVALUATE, time.monotonic()
    note_refused(session)


def write_rows(
    session: Session, rows: Rows, fetched: Iterable[MicroBatch], rows_of: Callable[[MicroBatch], Sequence[Row]]
) -> bool:
    """Write what `rows_of` returns for each batch, one row per sample. Returns whether all of it is written, on all
    ranks: not where a signal has ended it between two batches. Collective.

    Memory that runs out halves the batches, as in an evaluation: the runner calls again, and what is written stays.
    """

    def compute(micro: MicroBatch) -> Sequence[Row]:
        with torch.inference_mode(), session.state.precision.autocast:
            return rows_of(micro)

    session.autotuner.follow(session.sizes.evaluation)
    until_a_signal = itertools.takewhile(lambda _: session.stop.signal is None, fetched)
    with as_evaluated(session, session.config.mode):
        each_micro_batch(session, until_a_signal, compute, lambda _, found: rows.write(found))
    session.attempt.phase = Phase.SAVE  # what follows is collective: no rank may repeat it alone
    (session.stop.agreed,) = session.ranks.all_reduce_max(session.stop.signal or 0)
    return not session.stop.agreed
