"""What is read of a stream and not trained yet, and where the trained samples end."""

import copy
import logging
import pickle
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from trainapp.data.loader import Requests, in_workers
from trainapp.data.sample_fingerprint import fingerprint
from trainapp.data.stream import has_parts
from trainapp.data.stream_reader import COMPARED, Chunk, Place, Position, Read, Reader
from trainapp.errors import UserError
from trainapp.torch_private import outside_dispatch_modes
from trainapp.units import listed

READ_AT_ONCE = 16  # samples that a worker process sends together; it keeps two of these ahead
log = logging.getLogger(__name__)


def stream_shards(source: Any, setting: int | str, workers: int) -> dict[str, Any]:
    """Into how many parts each rank's share is split, and who reads them: `StreamBatches`' arguments.

    setting: `data.num_workers`; workers: what it comes to. `auto` is at most one process, whose samples are in the
    order of the stream: with more, it depends on their number.
    """
    shards = max(1, workers) if setting != "auto" and has_parts(source) else 1
    if setting != "auto" and workers > 1 and shards == 1:
        log.info(
            "data.num_workers=%s: one process reads the stream, since a %s cannot be read in parts (it has no method "
            "`shard(index, count)`)",
            setting,
            type(source).__name__,
        )
    return {"shards": shards, "workers": min(1, workers)}


class HeldSamples(Dataset):
    """The samples of a step by their numbers, for the loader that collates them: a data set for as long as it takes."""

    moves_at_commit = True  # with the stream's position: nothing in the source is looked for state

    def __init__(self, source: Any):
        self._samples: dict[int, Any] = {}
        self._spare: Any = None  # of a rank that only keeps in step with the others
        for name in ("collate", "split"):
            if callable(getattr(source, name, None)):
                setattr(self, name, getattr(source, name))

    def __getitem__(self, number: int) -> Any:
        sample = self._samples.get(number, self._spare)
        if not hasattr(self, "collate"):
            return sample  # torch's collating copies it
        # A collate of the user's may take samples apart, or pass them on to a task that writes to its batch: a retry
        # must find them as they came.
        try:
            return copy.deepcopy(sample)
        except Exception:  # such as an open file
            return sample

    def __len__(self) -> int:
        return len(self._samples)

    def hold(self, numbers: list[int], samples: list[Any], spare: Any) -> None:
        """These samples and no others."""
        self._samples, self._spare = dict(zip(numbers, samples, strict=True)), spare


class Part:
    """One part of a stream. Samples stay here until `advance`, so that a retried step has the same ones.

    in_process: read by the calling process, no more than is asked for; else by a process of its own, ahead.
    """

    def __init__(self, reader: Reader, in_process: bool):
        self._reader, self._requests, self._has_warned = reader, Requests(), False
        self._loader = None if in_process else in_workers(reader, self._requests, 1, pinned=False)
        self.go_to(Position())

    def go_to(self, position: Position) -> None:
        """Continue from this position. Nothing is read yet."""
        self._start = position
        self._reading: Iterator[Any] | None = None  # until the first read
        self.epoch, self.number = position.epoch, position.number
        self._before = position.before
        self._base = position.base or Place(position.epoch)  # before the last trained sample
        self._last: deque[Any] = deque(maxlen=COMPARED)  # the last ones that were trained since `_start`
        self._chunks: deque[Chunk] = deque()  # of `epoch`
        self._offset = 0  # samples of the first chunk that are trained

    def position(self) -> Position:
        """Where the trained samples end."""
        if self.number == self._start.number and self.epoch == self._start.epoch:
            return self._start
        opaque: set[str] = set()
        last = (*self._start.last, *(fingerprint(sample, opaque) for sample in self._last))
        if opaque and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the stream's samples hold what cannot be compared (%s): a resumed run compares the rest of them alone "
                "to see whether the stream is the same again",
                listed(sorted(opaque)),
            )
        return Position(self.epoch, self.number, self._before, self._base, last[-COMPARED:])

    def available(self, epoch: int, wanted: int) -> int:
        """Reads until `wanted` samples of the epoch are here or there are no more. Returns how many are."""
        if self.epoch > epoch:
            return 0  # this part has ended
        count = self._buffered
        while count < wanted and not self._is_complete:
            self._read(wanted - count)
            count = self._buffered
        return min(count, wanted)

    def samples(self, count: int) -> list[Any]:
        """The next `count` samples, of those `available`."""
        samples: list[Any] = []
        offset = self._offset
        for chunk in self._chunks:
            samples += chunk.samples[offset : offset + count - len(samples)]
            offset = 0
        return samples

    def ends_after(self, epoch: int, count: int) -> bool:
        """Whether the part has no sample of the epoch after its next `count`, which are `available`."""
        return self.epoch > epoch or (self._is_complete and self._buffered == count)

    def advance(self, count: int) -> None:
        """Count the next `count` samples as trained."""
        while count:
            chunk = self._chunks[0]
            taken = min(count, len(chunk.samples) - self._offset)
            if taken:
                self._last.extend(chunk.samples[self._offset : self._offset + taken])
                self._offset, self.number, count = self._offset + taken, self.number + taken, count - taken
                self._base = chunk.base
            if self._offset == len(chunk.samples) and not chunk.ended:
                self._chunks.popleft()
                self._offset = 0

    def begin_next_epoch(self) -> None:
        """After the end of the epoch in all parts."""
        self._chunks.clear()
        self._before, self._offset, self.number = self.number, 0, 0
        self.epoch += 1

    def close(self) -> None:
        """End the process that reads ahead. What it has read is lost."""
        self._requests.requests = iter(())
        self._reading = self._loader = None

    @property
    def _buffered(self) -> int:
        return sum(len(chunk.samples) for chunk in self._chunks) - self._offset

    @property
    def _is_complete(self) -> bool:
        return bool(self._chunks) and self._chunks[-1].ended

    def _read(self, most: int) -> None:
        started = time.monotonic()
        try:
            chunk = self._next_chunk(most)
        except Exception:  # such as for want of memory: an iterator that has raised may have lost samples, or ended
            self.go_to(self.position())
            raise
        if chunk.problem:
            raise UserError(
                f"data: the stream cannot continue where it was saved: {chunk.problem}; restore the data, or begin "
                "a new run with these weights by checkpointing.load=weights"
            )
        if chunk.skipped and not chunk.tells:
            log.info(
                "the stream does not tell its position (`state_dict` and `load_state_dict`): the first %d samples of "
                "epoch %d were read again and skipped, in %.1f s",
                chunk.skipped,
                self._base.epoch,
                time.monotonic() - started,
            )
        self._chunks.append(chunk)

    def _next_chunk(self, most: int) -> Chunk:
        with outside_dispatch_modes():  # a source that makes tensors is none of a trace's business
            if self._loader is None:
                position = self._start if self._reading is None else None
                self._reading = iter(())
                return self._reader[Read(position, most)]
            if self._reading is None:
                self._requests.requests = _requests(self._start)
                self._reading = iter(self._loader)
            return pickle.loads(next(self._reading))


def _requests(start: Position) -> Iterator[Read]:
    yield Read(start, READ_AT_ONCE)
    while True:
        yield Read(None, READ_AT_ONCE)
