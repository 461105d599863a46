"""Reads one shard of a stream, in this process or ahead in one of its own, from any position of the trained samples.

The position is that of the samples trained, never of those read: what is read is held until its step is committed, so
that a retried step has the same samples. After a resume, a source with `state_dict` and `load_state_dict` continues
from its own state; any other is read again from the beginning of the epoch, and what was trained is skipped. The global
generators are seeded before each sample, so that random transforms and shuffles by them are the same again.
"""

import copy
import logging
import pickle
import time
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trainapp.data.loader import Requests, in_workers, raise_if_error, seed_generators
from trainapp.errors import UserError
from trainapp.rng import preserved_rng
from trainapp.torch_private import become_main_process, outside_dispatch_modes

READ_AT_ONCE = 16  # samples that a worker process sends together; it keeps two of these ahead
log = logging.getLogger(__name__)


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had in turn."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def is_empty(dataset: Any) -> bool:
    """Whether the data set is known to have no samples: of a stream, that shows only when it is read."""
    return not is_stream(dataset) and len(dataset) == 0


def at_most(samples: int, dataset: Any) -> int:
    """This many samples, or all of the data set if it is known to have fewer."""
    return samples if is_stream(dataset) else min(samples, len(dataset))


def has_shards(source: Any) -> bool:
    """Whether the source can be read in shards: one of Hugging Face's, or with a method `shard(index, count)`."""
    return _is_of_datasets(source) or callable(getattr(source, "shard", None))


def shard_of(source: Any, index: int, count: int) -> Any:
    """The shard `index` of `count` that the source makes of itself."""
    if count == 1:
        return source
    if _is_of_datasets(source):
        from datasets.distributed import split_dataset_by_node  # the source comes from there, so it is installed

        return split_dataset_by_node(source, index, count)
    return source.shard(index, count)


def tells_position(source: Any) -> bool:
    """Whether its `state_dict` says where it is.

    That of Hugging Face's shuffle buffer does not hold the buffer: samples in it would be lost (datasets 5.2,
    iterable_dataset.py, BufferShuffledExamplesIterable).
    """
    has_protocol = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_protocol and not (_is_of_datasets(source) and _has_shuffle_buffer(getattr(source, "_ex_iterable", None)))


def _is_of_datasets(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "datasets"


def _has_shuffle_buffer(iterable: Any) -> bool:
    if type(iterable).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(iterable, "ex_iterable", None), *(getattr(iterable, "ex_iterables", None) or ())]
    return any(_has_shuffle_buffer(one) for one in inner if one is not None)


class _End(Enum):
    END = "after the last sample"  # instead of a sample; stays itself in another process


class Place(NamedTuple):
    """From where a source can be read: before the sample `number` of an epoch.

    state: what its `state_dict` said there; None: it is the beginning of the epoch.
    """

    epoch: int = 0
    number: int = 0
    state: Any = None


class Position(NamedTuple):
    """After `number` samples of an epoch. base: the nearest place before it from where the source can be read; it may
    be in the epoch before, whose end leads into this one.
    """

    epoch: int = 0
    number: int = 0
    base: Place = Place()


class Read(NamedTuple):
    """Read up to `most` samples, at least one, from `position`; None: from where the last ones ended."""

    position: Position | None
    most: int


class Chunk(NamedTuple):
    """Samples of one epoch in a row. base: from where they can be read again. ended: whether the epoch has no more.
    tells: whether the source has states. skipped: how many samples were read again to come here.
    """

    base: Place
    samples: list[Any]
    ended: bool
    tells: bool
    skipped: int


class Reader(Dataset):
    """Reads one shard of a stream: `reader[Read(...)]` is a `Chunk`, or in a worker process its pickle.

    The end of an epoch is followed by the next one, which `set_epoch` announces if the source has it. Pickled, because
    torch sends every tensor of a worker by an open file.
    """

    def __init__(self, source: Any, seed: int, index: int = 0, count: int = 1):
        self.source, self.seed, self.shard = shard_of(source, index, count), seed, (index, count)
        self._tells, self._pickles = tells_position(self.source), False
        self._iterator: Iterator[Any] = iter(())
        self._epoch = self._number = -1
        self._base = Place()  # at `_next` or before it
        self._next: Any = _End.END  # read ahead, so that the last sample of an epoch is known as such

    def __getitem__(self, request: Read) -> Any:
        if get_worker_info() is not None:
            become_main_process()
            self._pickles = True
        with preserved_rng(torch.device("cpu")):
            skipped = 0
            if request.position is not None:
                skipped = self._go_to(request.position)
            elif self._next is _End.END:
                self._begin_next_epoch()
            # The first sample of an epoch alone: the others can then be read again from a state in it.
            most = 1 if self._tells and not self._number else request.most
            base = self._base
            samples: list[Any] = []
            while self._next is not _End.END and len(samples) < most:
                samples.append(self._take(becomes_base=len(samples) + 1 == most))
            chunk = Chunk(base, samples, self._next is _End.END, self._tells, skipped)
        return pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL) if self._pickles else chunk

    def _take(self, becomes_base: bool = False) -> Any:
        """The next sample. becomes_base: whether the place after it does."""
        sample, self._number = self._next, self._number + 1
        if becomes_base and self._tells:
            self._base = Place(self._epoch, self._number, self._state())
        self._next = self._read()
        return sample

    def _go_to(self, position: Position) -> int:
        """Read up to the position. Returns how many samples that took. Raises UserError if the stream ends before."""
        self._base, skipped = position.base, 0
        self._open(position.base)
        while (self._epoch, self._number) != position[:2]:
            if self._next is not _End.END:
                self._take(becomes_base=(self._epoch, self._number + 1) == position[:2])
                skipped += 1
            elif self._epoch < position.epoch:
                self._begin_next_epoch()
            else:
                raise UserError(
                    f"data: the stream cannot continue where it was saved: it ended after {self._number} samples of "
                    f"epoch {self._epoch}, of which {position.number} were trained before; restore the data, or begin "
                    "a new run with these weights by checkpointing.load=weights"
                )
        return skipped

    def _begin_next_epoch(self) -> None:
        self._open(Place(self._epoch + 1))
        if not self._tells:  # else the end of the epoch before leads here, until there is a state in this one
            self._base = Place(self._epoch)

    def _open(self, place: Place) -> None:
        """Begin at the place."""
        self._epoch, self._number = place.epoch, place.number
        seed_generators(self.seed, self._epoch, *self.shard)  # for what the source shuffles when an epoch begins
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self._epoch)
        if place.state is not None:
            self.source.load_state_dict(copy.deepcopy(place.state))
        self._iterator = iter(self.source)
        before = self._state() if self._tells and place.state is None else None
        self._next = self._read()
        if before is not None and self._next is not _End.END and pickle.dumps(before) == pickle.dumps(self._state()):
            self._tells = False  # it counts a sample only after it was yielded: its states are one too low

    def _read(self) -> Any:
        seed_generators(self.seed, self._epoch, *self.shard, self._number)
        return next(self._iterator, _End.END)

    def _state(self) -> Any:
        return copy.deepcopy(self.source.state_dict())


class Shard:
    """One shard of a stream. Samples stay here until `advance`, so that a retried step has the same ones.

    in_process: read by the calling process, no more than is asked for; else by a process of its own, ahead.
    """

    def __init__(self, reader: Reader, in_process: bool):
        self._reader, self._requests, self._tells = reader, Requests(), True
        self._loader = None if in_process else in_workers(reader, self._requests, 1, pinned=False)
        self.go_to(Position())

    def go_to(self, position: Position) -> None:
        """Continue from this position. Nothing is read yet."""
        self.epoch, self.number, self._base = self.position = position
        self._chunks: Iterator[Any] | None = None  # until the first read
        self._buffer: list[tuple[Any, Place]] = []  # the next samples of the epoch, and from where each can be read
        self._ended = False  # whether the epoch has no others

    def available(self, epoch: int, wanted: int) -> int:
        """Reads until `wanted` samples of the epoch are here or there are no more. Returns how many are."""
        if self.epoch > epoch:
            return 0  # this shard has ended
        while len(self._buffer) < wanted and not self._ended:
            self._read(wanted - len(self._buffer))
        return min(len(self._buffer), wanted)

    def sample(self, number: int) -> Any:
        """One of those `available`."""
        return self._buffer[number][0]

    def ends_after(self, epoch: int, count: int) -> bool:
        """Whether the shard has no sample of the epoch after its next `count`, which are `available`."""
        return self.epoch > epoch or (self._ended and len(self._buffer) == count)

    def advance(self, count: int) -> None:
        """Count the next `count` samples as trained."""
        if count:
            self.number, self._base = self.number + count, self._buffer[count - 1][1]
            del self._buffer[:count]
            self.position = Position(self.epoch, self.number, self._base)

    def begin_next_epoch(self) -> None:
        """After the end of the epoch in all shards."""
        self._buffer, self._ended = [], False
        self.epoch, self.number = self.epoch + 1, 0
        if not self._tells:
            self._base = Place(self.epoch)
        self.position = Position(self.epoch, self.number, self._base)

    def close(self) -> None:
        """End the process that reads ahead. What it has read is lost."""
        self._requests.requests = iter(())
        self._chunks = self._loader = None

    def _read(self, most: int) -> None:
        started = time.monotonic()
        try:
            chunk = self._next_chunk(most)
        except Exception:  # such as for want of memory: an iterator that has raised may have lost samples, or ended
            self.go_to(self.position)
            raise
        if chunk.skipped and not chunk.tells:
            log.info(
                "the stream does not tell its position (`state_dict` and `load_state_dict`): the first %d samples of "
                "epoch %d were read again and skipped, in %.1f s",
                chunk.skipped,
                self.epoch,
                time.monotonic() - started,
            )
        self._buffer += [(sample, chunk.base) for sample in chunk.samples]
        self._ended, self._tells = chunk.ended, chunk.tells

    def _next_chunk(self, most: int) -> Chunk:
        with outside_dispatch_modes():  # a source that makes tensors is none of a trace's business
            start = self.position if self._chunks is None else None
            if self._loader is None:
                self._chunks = iter(())
                return self._reader[Read(start, most)]
            if self._chunks is None:
                self._requests.requests = _requests(self.position)
                self._chunks = iter(self._loader)
            return pickle.loads(raise_if_error(next(self._chunks)))


def _requests(start: Position) -> Iterator[Read]:
    yield Read(start, READ_AT_ONCE)
    while True:
        yield Read(None, READ_AT_ONCE)
