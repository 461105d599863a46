"""Reads one shard of a stream, in this process or ahead in a separate one, from any position of the trained samples.

The position counts samples trained, not samples read: a sample is held until its step is committed, so a retried step
has the same samples. After a resume, a source with `state_dict` and `load_state_dict` continues from its own state; any
other is read again from the start of the epoch, and trained samples are skipped. The global generators are seeded
before each sample, so that random transforms and shuffles repeat.
"""

import contextlib
import copy
import io
import logging
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from trainapp.data.batch import compact
from trainapp.data.loader import loader_of, started
from trainapp.errors import UserError
from trainapp.rng import CPU, preserved_rng, seed_from
from trainapp.torch_private import become_main_process

log = logging.getLogger(__name__)
AHEAD = 32  # samples that a worker process keeps ready
STATE_EVERY = 16  # samples; a position in between is reached by reading on from the last state
_END = object()  # takes the place of a sample after the last


def is_stream(dataset: Any) -> bool:
    """Whether the data set is read sequentially."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def is_empty(dataset: Any) -> bool:
    """Whether the data set is known to have no samples (unknown for a stream until it is read)."""
    return not is_stream(dataset) and len(dataset) == 0


def at_most(samples: int, dataset: Any) -> int:
    """`samples`, or the size of the data set if it is known to be smaller."""
    return samples if is_stream(dataset) else min(samples, len(dataset))


def _shard_of(source: Any, index: int, count: int) -> Any:
    if count == 1:
        return source
    if _is_of_datasets(source):
        from datasets.distributed import split_dataset_by_node  # installed, since the source comes from it

        return split_dataset_by_node(source, index, count)
    return source.shard(index, count)


def _tells_position(source: Any) -> bool:
    """Whether the source's `state_dict` holds its position.

    With Hugging Face's shuffle buffer it lacks the buffer, whose samples would be lost (datasets 5.2,
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


class StreamPosition(NamedTuple):
    """A place from which a source can be read: before the sample `number` of an epoch.

    state: its `state_dict` at this place; None at the start of the epoch.
    """

    epoch: int = 0
    number: int = 0
    state: Any = None


class Read(NamedTuple):
    """A sample. base: an earlier place from which it can be read again, possibly in the previous epoch."""

    sample: Any
    base: StreamPosition


class Shard(IterableDataset):
    """One shard of a stream. Samples are held until `advance`, so that a retried step has the same ones.

    in_process: read by the calling process; otherwise ahead, by a separate process. Attributes: the position of the
    trained samples, `epoch` and `number`, and `base`, the nearest earlier place from which the source can be read.
    """

    def __init__(self, source: Any, seed: int, index: int = 0, count: int = 1, in_process: bool = True):
        divided = getattr(source, "_distributed", None)  # of Hugging Face's streams
        if divided is not None and divided.world_size > 1:
            raise UserError("data: remove split_dataset_by_node: ranks divide the stream, and would do so twice")
        self.source, self.seed, self.shard = _shard_of(source, index, count), seed, (index, count)
        self._in_process, self._tells = in_process, _tells_position(self.source)
        self.go_to(0)

    def go_to(self, epoch: int, number: int = 0, base: StreamPosition | None = None) -> None:
        """Continue after `number` samples of an epoch. Reads nothing yet."""
        self.epoch, self.number, self.base = epoch, number, base or StreamPosition(epoch)
        self._reads: Iterator[Read | None] | None = None  # None until the first read
        self._buffer: list[Read] = []  # the next samples of the epoch
        self._ended = False  # whether the epoch has no more

    def available(self, epoch: int, wanted: int) -> int:
        """Read until `wanted` samples of the epoch are held or none are left. Returns the number held."""
        if self.epoch > epoch:
            return 0  # this shard has ended
        if len(self._buffer) < wanted and not self._ended:
            # Once for all samples: it takes longer than reading a small one.
            with preserved_rng(CPU) if self._in_process else contextlib.nullcontext():
                while len(self._buffer) < wanted and not self._ended:
                    self._read()
        return min(len(self._buffer), wanted)

    def sample(self, number: int) -> Any:
        """A held sample; see `available`."""
        return self._buffer[number].sample

    def advance(self, count: int) -> None:
        """Count the next `count` samples as trained."""
        if count:
            self.number, self.base = self.number + count, self._buffer[count - 1].base
            del self._buffer[:count]

    def begin_next_epoch(self) -> None:
        """Call after the end of the epoch in all shards."""
        self.epoch, self.number, self._ended = self.epoch + 1, 0, False
        if self.base.state is None:
            self.base = StreamPosition(self.epoch)

    def close(self) -> None:
        """End the process that reads ahead. Discards its samples."""
        self.go_to(self.epoch, self.number, self.base)

    def _read(self) -> None:
        """Read the next sample, or the end of the epoch."""
        try:
            if self._reads is None:
                self._note_skipped()
                self._reads = iter(self) if self._in_process else self._ahead()
            read = next(self._reads)
        except Exception:  # such as out of memory: an iterator that has raised may have lost samples, or ended
            self.close()
            raise
        if read is None:
            self._ended = True
        else:
            self._buffer.append(read)

    def _note_skipped(self) -> None:
        """Log that samples will be skipped: when reading begins, which not every mode does."""
        if self.number and self.base.state is None:
            log.info(
                "the stream has no `state_dict` of its position (or counts a sample only after it was yielded): "
                "the first %d samples of epoch %d are read again and skipped",
                self.number,
                self.epoch,
            )

    def _ahead(self) -> Iterator[Read | None]:
        # Pickled, because torch sends every tensor of a worker through an open file.
        return map(pickle.loads, started(loader_of(self, 1, prefetch_factor=AHEAD, collate_fn=_pickled)))

    def __iter__(self) -> Iterator[Read | None]:
        """The samples after the position, in this and all later epochs, with None after each epoch's end. Seeds the
        global generators. Raises UserError if the stream ends before the position.
        """
        become_main_process()
        start, place, base = (self.epoch, self.number), self.base, self.base
        while True:
            epoch, number, _ = place
            opened = self._open(place)
            if not self._tells:
                base = place  # else: read from the previous epoch, until there is a state in this one
            while (sample := self._next(epoch, number)) is not _END:
                number += 1
                if (epoch, number) > start:
                    yield Read(sample, base)
                if self._tells and (number == 1 or number % STATE_EVERY == 0):
                    # Never the state after the last trained sample: that of an epoch's end may restart it.
                    state = self._state()
                    if number == 1 and pickle.dumps(state) == pickle.dumps(opened):
                        self._tells = False  # it counts a sample only after it was yielded: its states are one too low
                    else:
                        base = StreamPosition(epoch, number, state)
            if epoch == start[0] and number < start[1]:
                raise UserError(
                    f"data: the stream cannot continue where it was saved: it ended after {number} samples of epoch "
                    f"{epoch}, of which {start[1]} were trained before; restore the data, or start a new run from "
                    "its weights with model.init_from=RUN"
                )
            if epoch >= start[0]:
                yield None
            place = StreamPosition(epoch + 1)

    def _open(self, place: StreamPosition) -> Any:
        """Begin at the place. Returns the source's state at the start of an epoch, if it has one."""
        seed_from(CPU, self.seed, place.epoch, *self.shard)  # for shuffling at the start of an epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(place.epoch)
        if place.state is not None:
            self.source.load_state_dict(copy.deepcopy(place.state))
        self._iterator = iter(self.source)
        return self._state() if self._tells and place.state is None else None

    def _next(self, epoch: int, number: int) -> Any:
        seed_from(CPU, self.seed, epoch, *self.shard, number)
        return next(self._iterator, _END)

    def _state(self) -> Any:
        return copy.deepcopy(self.source.state_dict())


def _pickled(read: Read | None) -> bytes:
    file = io.BytesIO()
    _CompactPickler(file).dump(read)
    return file.getvalue()


class _CompactPickler(pickle.Pickler):
    """Pickles a view of a larger tensor without the rest of its storage, which is often the whole data set.

    A pickler rather than a walk over the sample: it also reaches tensors in objects that are not containers, and one
    that occurs twice stays one.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            compacted = compact(value)
            if compacted is not value:
                return compacted.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented
