"""Streams: data sets that are read from their beginning to their end, and the parts that ranks and workers read.

A position in a stream is that of the samples trained, never of those fetched. A source with `state_dict` and
`load_state_dict` continues from its own state; any other is read again from the beginning of its epoch, up to the
position. Both ways end with a sample that was trained before, which is compared: a stream that is not the same again is
refused.
"""

import copy
import hashlib
import pickle
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from trainapp.data.batch import node_type
from trainapp.data.loader import seed_generators
from trainapp.rng import preserved_rng
from trainapp.torch_workers import become_main_process, is_loader_worker

_CPU = torch.device("cpu")


class _End(Enum):
    END = "after the last sample"  # instead of a sample; stays itself in another process


_END = _End.END


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had in turn: a torch IterableDataset, or what has `__iter__` but no indices."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def is_empty(dataset: Any) -> bool:
    """Whether the data set is known to have no samples: of a stream, that shows only when it is read."""
    return not is_stream(dataset) and len(dataset) == 0


def at_most(samples: int, dataset: Any) -> int:
    """This many samples, or all of the data set if it is known to have fewer."""
    return samples if is_stream(dataset) else min(samples, len(dataset))


def has_parts(source: Any) -> bool:
    """Whether the source can be read in parts: one of Hugging Face's, or with a method `shard(index, count)`."""
    return _is_of_datasets(source) or callable(getattr(source, "shard", None))


def part_of(source: Any, index: int, count: int) -> Any:
    """The part `index` of `count` that the source makes of itself."""
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


class Position(NamedTuple):
    """A place in a part of a stream: after `number` samples of an epoch.

    state: the source's before the sample `state_number`, from which the others are read again; None: from the first.
    last: the fingerprint of the sample before this place; None at the beginning.
    """

    epoch: int = 0
    number: int = 0
    state: Any = None
    state_number: int = 0
    last: str | None = None


class Read(NamedTuple):
    """Read up to `most` samples, at least one, from `position`; None: from where the last ones ended."""

    position: Position | None
    most: int


class Chunk(NamedTuple):
    """Samples of one epoch in a row. number: how many of the epoch come before them. state: as in `Position`.

    ended: whether they are the epoch's last, or it has none. tells: whether the source has states. problem: why the
    position cannot be reached.
    """

    epoch: int
    number: int
    state: Any
    samples: list[Any]
    ended: bool
    tells: bool
    problem: str | None = None


class Reader(Dataset):
    """Reads one part of a stream: `reader[Read(...)]` is a `Chunk`, or in a worker process its pickle.

    The end of an epoch is followed by the next one, which `set_epoch` announces if the source has it. The global
    generators are seeded before each sample from (seed, epoch, part, number), so that random transforms in the source
    give the same sample again. Pickled, because torch sends every tensor of a worker by an open file.
    """

    def __init__(self, source: Any, seed: int, index: int, count: int):
        self.source, self.seed, self.part = part_of(source, index, count), seed, (index, count)
        self._tells, self._pickles = tells_position(self.source), False
        self._iterator: Iterator[Any] = iter(())
        self._epoch = self._number = -1
        self._state: Any = None  # before `_next`; None at the beginning of an epoch
        self._next: Any = _END  # read ahead, so that the last sample of an epoch is known as such

    def __getitem__(self, request: Read) -> Any:
        if is_loader_worker():
            become_main_process()
            self._pickles = True
        with preserved_rng(_CPU):
            problem = None
            if request.position is not None:
                problem = self._go_to(request.position)
            elif self._next is _END:
                self._open(Position(self._epoch + 1))
            chunk = self._chunk(request.most, problem)
        return pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL) if self._pickles else chunk

    def _chunk(self, most: int, problem: str | None) -> Chunk:
        number, state = self._number, self._state
        samples: list[Any] = []
        while self._next is not _END and len(samples) < most:
            samples.append(self._next)
            self._number += 1
            if len(samples) == most:
                self._state = self._snapshot()
            self._next = self._read()
        return Chunk(self._epoch, number, state, samples, self._next is _END, self._tells, problem)

    def _go_to(self, position: Position) -> str | None:
        """Read up to the position. Returns why that failed, or None.

        Where the state leads to another sample, as that of a source which shuffles with the global generators whenever
        it begins, everything is read again from the beginning of the epoch.
        """
        problem = self._reach(position)
        if problem is not None and position.state is not None:
            problem, self._tells = self._reach(position._replace(state=None)), False
        return problem

    def _reach(self, position: Position) -> str | None:
        """As `_go_to`, in the way that the position says."""
        self._open(position)
        sample = None
        while self._number < position.number and self._next is not _END:
            sample, self._number = self._next, self._number + 1
            if self._number == position.number:
                self._state = self._snapshot()
            self._next = self._read()
        if self._number < position.number:
            ended, trained = self._number, position.number
            return f"it ended after {ended} samples of epoch {position.epoch}, of which {trained} were trained before"
        if position.last is not None and fingerprint(sample) != position.last:
            return (
                f"sample {position.number} of epoch {position.epoch} is not the one that was trained before: the data "
                "has changed, or the stream has another order each time (give its shuffling a seed), or its "
                "`state_dict` does not count a sample before it is yielded"
            )
        return None

    def _open(self, position: Position) -> None:
        """Begin at the state of the position, or at the beginning of its epoch."""
        self._epoch, self._number = position.epoch, position.state_number if position.state is not None else 0
        seed_generators(self.seed, self._epoch, *self.part)  # for what the source shuffles when an epoch begins
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self._epoch)
        if position.state is not None:
            self.source.load_state_dict(copy.deepcopy(position.state))
        self._iterator, self._state = iter(self.source), position.state
        before = self._snapshot() if position.state is None else None
        self._next = self._read()
        if before is not None and self._next is not _END and pickle.dumps(before) == pickle.dumps(self._snapshot()):
            self._tells = False  # its state does not move with the samples

    def _read(self) -> Any:
        seed_generators(self.seed, self._epoch, *self.part, self._number)
        return next(self._iterator, _END)

    def _snapshot(self) -> Any:
        return copy.deepcopy(self.source.state_dict()) if self._tells else None


def fingerprint(sample: Any) -> str:
    """Equal for samples with equal tensors, arrays, numbers and strings, whatever their containers are made of."""
    digest = hashlib.blake2b(digest_size=12)
    _add(digest, sample)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, child in value.items():
            digest.update(repr(key).encode())
            _add(digest, child)
    elif isinstance(value, (str, bytes, int, float, complex, type(None), np.generic)):
        digest.update(repr(value).encode())
    elif (node := node_type(value)) is not None:
        for child in node.children(value):
            _add(digest, child)
    else:
        digest.update(type(value).__name__.encode())
