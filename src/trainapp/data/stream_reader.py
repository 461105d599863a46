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
from trainapp.data.workers import build_loader, start_iteration
from trainapp.errors import UserError
from trainapp.rng import CPU, preserved_rng, seed_from
from trainapp.torch_private import become_main_process

log = logging.getLogger(__name__)
AHEAD = 32  # samples that a worker process keeps ready
STATE_EVERY = 16  # samples; a position in between is reached by reading on from the last state
_END = object()  # takes the place of a sample after the last


def is_stream(dataset: Any) -> bool:
    """Return whether the data set is read sequentially."""
    if isinstance(dataset, IterableDataset):
        return True
    is_indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and not is_indexable


def is_empty(dataset: Any) -> bool:
    """Return whether the data set is known to have no samples (unknown for a stream until it is read)."""
    return not is_stream(dataset) and len(dataset) == 0


def at_most(samples: int, dataset: Any) -> int:
    """Return `samples`, or the size of the data set if it is known to be smaller."""
    if is_stream(dataset):
        return samples
    return min(samples, len(dataset))


class StreamPosition(NamedTuple):
    """A place from which a source can be read: before the sample `number` of an epoch."""

    epoch: int = 0
    number: int = 0
    state: Any = None  # the source's `state_dict` at this place; None at the start of the epoch


class Read(NamedTuple):
    """A sample that was read."""

    sample: Any
    base: StreamPosition  # an earlier place from which it can be read again, possibly in the previous epoch


class Shard(IterableDataset):
    """One shard of a stream. Samples are held until `advance`, so that a retried step has the same ones.

    Args:
        source: the stream.
        seed: for the samples' random transforms.
        index: of this shard.
        count: the number of shards; 1 reads the whole stream.
        in_process: read by the calling process; otherwise ahead, by a separate process.

    Attributes:
        epoch: of the position of the trained samples.
        number: trained samples of this epoch.
        base: the nearest earlier place from which the source can be read.
    """

    def __init__(self, source: Any, seed: int, index: int = 0, count: int = 1, in_process: bool = True):
        distribution = getattr(source, "_distributed", None)  # of Hugging Face's streams
        if distribution is not None and distribution.world_size > 1:
            raise UserError(
                "data: remove split_dataset_by_node: trainapp itself divides the stream among the ranks, so it would "
                "be divided twice"
            )
        self.source = _shard_of(source, index, count)
        self.seed = seed
        self.shard = (index, count)
        self._in_process = in_process
        self._tells_position = _tells_position(self.source)
        self.go_to(0)

    def go_to(self, epoch: int, number: int = 0, base: StreamPosition | None = None) -> None:
        """Continue after `number` samples of an epoch. Reads nothing yet."""
        self.epoch = epoch
        self.number = number
        self.base = base or StreamPosition(epoch)
        self._reads: Iterator[Read | None] | None = None  # None until the first read
        self._buffer: list[Read] = []  # the next samples of the epoch
        self._ended = False  # whether the epoch has no more

    def available(self, epoch: int, count: int) -> int:
        """Read until `count` samples of the epoch are held or none are left. Return the number held."""
        if self.epoch > epoch:
            return 0  # this shard has ended
        if len(self._buffer) < count and not self._ended:
            # Once for all samples: preserving the generators takes longer than reading a small sample.
            preserved = preserved_rng(CPU) if self._in_process else contextlib.nullcontext()
            with preserved:
                while len(self._buffer) < count and not self._ended:
                    self._read_next()
        return min(len(self._buffer), count)

    def sample(self, number: int) -> Any:
        """Return a held sample; see `available`."""
        return self._buffer[number].sample

    def advance(self, count: int) -> None:
        """Count the next `count` samples as trained."""
        if count == 0:
            return
        self.number += count
        self.base = self._buffer[count - 1].base
        del self._buffer[:count]

    def begin_next_epoch(self) -> None:
        """Move to the start of the next epoch. Call after the end of the epoch in all shards."""
        self.epoch += 1
        self.number = 0
        self._ended = False
        if self.base.state is None:
            self.base = StreamPosition(self.epoch)

    def close(self) -> None:
        """End the process that reads ahead. Discards its samples."""
        self.go_to(self.epoch, self.number, self.base)

    def _read_next(self) -> None:
        """Read the next sample, or the end of the epoch."""
        try:
            if self._reads is None:
                self._note_skipped()
                if self._in_process:
                    self._reads = iter(self)
                else:
                    self._reads = self._read_ahead()
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

    def _read_ahead(self) -> Iterator[Read | None]:
        """Iterate over this shard in a process of its own."""
        # Pickled, because torch sends every tensor of a worker through an open file.
        loader = build_loader(self, 1, prefetch_factor=AHEAD, collate_fn=_pickled)
        return map(pickle.loads, start_iteration(loader))

    def __iter__(self) -> Iterator[Read | None]:
        """Yield the samples after the position, in this and all later epochs, with None after each epoch's end.

        Seeds the global generators. Raises UserError if the stream ends before the position.
        """
        become_main_process()
        position = (self.epoch, self.number)
        start = self.base  # where the source is opened
        base = self.base  # of the next sample
        while True:  # for each epoch
            epoch = start.epoch
            number = start.number  # samples of the epoch so far
            initial_state = self._open(start)
            if not self._tells_position:
                base = start  # otherwise it is in the previous epoch until there is a state in this one

            # Read the epoch. Samples up to the position have been trained, and are skipped.
            while (sample := self._next_sample(epoch, number)) is not _END:
                number += 1
                if (epoch, number) > position:
                    yield Read(sample, base)
                if self._tells_position and (number == 1 or number % STATE_EVERY == 0):
                    # The base of later samples only: the state after an epoch's last sample may restart the epoch.
                    state = self._source_state()
                    if number == 1 and pickle.dumps(state) == pickle.dumps(initial_state):
                        # It counts a sample only after it was yielded: its states are one too low.
                        self._tells_position = False
                    else:
                        base = StreamPosition(epoch, number, state)

            # The epoch has ended: an error if the position lies after its end.
            trained_epoch, trained = position
            if epoch == trained_epoch and number < trained:
                raise UserError(
                    f"data: the stream cannot continue where it was saved: it ended after {number} samples of epoch "
                    f"{epoch}, of which {trained} were trained before; restore the data, or start a new run from "
                    "its weights with model.init_from=RUN"
                )
            if epoch >= trained_epoch:
                yield None
            start = StreamPosition(epoch + 1)

    def _open(self, start: StreamPosition) -> Any:
        """Begin to read at a position. Return the source's state at the start of an epoch, if it has one."""
        seed_from(CPU, self.seed, start.epoch, *self.shard)  # for shuffling at the start of an epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(start.epoch)
        if start.state is not None:
            self.source.load_state_dict(copy.deepcopy(start.state))
        self._iterator = iter(self.source)

        begins_epoch = start.state is None
        if self._tells_position and begins_epoch:
            return self._source_state()
        return None

    def _next_sample(self, epoch: int, number: int) -> Any:
        """Return the source's next sample, with the generators seeded for it, or `_END`."""
        seed_from(CPU, self.seed, epoch, *self.shard, number)
        return next(self._iterator, _END)

    def _source_state(self) -> Any:
        return copy.deepcopy(self.source.state_dict())


def _shard_of(source: Any, index: int, count: int) -> Any:
    """Return one of `count` shards of the source."""
    if count == 1:
        return source
    if _is_of_datasets(source):
        from datasets.distributed import split_dataset_by_node  # installed, since the source comes from it

        return split_dataset_by_node(source, index, count)
    return source.shard(index, count)


def _tells_position(source: Any) -> bool:
    """Return whether the source's `state_dict` holds its position.

    With Hugging Face's shuffle buffer it lacks the buffer, whose samples would be lost (datasets 5.2,
    iterable_dataset.py, BufferShuffledExamplesIterable).
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(source, method, None)):
            return False
    if not _is_of_datasets(source):
        return True
    examples = getattr(source, "_ex_iterable", None)
    return not _has_shuffle_buffer(examples)


def _is_of_datasets(source: Any) -> bool:
    """Return whether the source is a stream of the package `datasets`."""
    return type(source).__module__.partition(".")[0] == "datasets"


def _has_shuffle_buffer(iterable: Any) -> bool:
    """Return whether one of the iterables that feed a stream of `datasets` has a shuffle buffer."""
    if type(iterable).__name__ == "BufferShuffledExamplesIterable":
        return True
    # One that transforms another has it as `ex_iterable`, one that mixes several as `ex_iterables`.
    inner_iterables = [getattr(iterable, "ex_iterable", None)]
    inner_iterables.extend(getattr(iterable, "ex_iterables", None) or [])
    return any(_has_shuffle_buffer(inner) for inner in inner_iterables if inner is not None)


def _pickled(read: Read | None) -> bytes:
    file = io.BytesIO()
    _CompactPickler(file).dump(read)
    return file.getvalue()


class _CompactPickler(pickle.Pickler):
    """A pickler of views of larger tensors without the rest of their storage, which is often the whole data set.

    A pickler rather than a walk over the sample: it also reaches tensors in objects that are not containers, and one
    that occurs twice stays one.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            compact_value = compact(value)
            if compact_value is not value:
                return compact_value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented
