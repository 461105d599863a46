"""A batch is any pytree: tensors in arbitrarily nested containers. Which dimension holds the samples is unknown.

Containers are dicts and other mappings, lists, tuples, namedtuples, dataclasses, and the types registered with
`torch.utils._pytree`, such as TensorDict. Strings, numbers, None and objects of unknown types pass through untouched.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from trainapp.torch_private import registered_container

Rebuild = Callable[[list[Any]], Any]  # makes a container of the same type with new children


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The batch with `function(tensor)` in place of every tensor; containers keep their types."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    opened = opened_container(batch)
    if opened is None:
        return batch
    children, rebuild = opened
    return rebuild([map_tensors(function, child) for child in children])


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The batch's tensors, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    opened = opened_container(batch)
    tensors: list[torch.Tensor] = []
    for child in opened[0] if opened else ():
        tensors += [child] if isinstance(child, torch.Tensor) else tensors_in(child)  # one call less per tensor
    return tensors


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a view whose storage is larger than itself; any other tensor unchanged.

    `pickle` and `copy.deepcopy` take a tensor with its whole storage: a row with all the rows of its table.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def compacted(batch: Any) -> Any:
    """The batch with `compact` tensors. One that occurs twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def compact_once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = compact(tensor)
        return copies[id(tensor)]

    return map_tensors(compact_once, batch)


def elements_in(batch: Any) -> int:
    """The number of elements in all of the batch's tensors."""
    return sum(map(torch.Tensor.numel, tensors_in(batch)))


def bucket_of(samples: int, elements: int) -> int:
    """The bucket of a shape: the elements per sample, rounded up to a power of two."""
    return 1 << (max(1, -(-elements // samples)) - 1).bit_length()


def opened_container(batch: Any) -> tuple[Sequence[Any], Rebuild] | None:
    """A container's children, and a function that rebuilds it from new ones; None if `batch` is not a container."""
    kind = type(batch)
    if kind is dict:
        return list(batch.values()), lambda values: dict(zip(batch, values, strict=True))
    if kind in _LEAVES:
        return None
    if kind is PackedSequence:  # a namedtuple whose `batch_sizes` must stay on the CPU
        packed = (batch.data, batch.sorted_indices, batch.unsorted_indices)
        return packed, lambda values: PackedSequence(values[0], batch.batch_sizes, *values[1:])
    registered = registered_container(kind)
    if registered is not None:
        children, context = registered.flatten_fn(batch)
        return children, lambda values: registered.unflatten_fn(values, context)
    if isinstance(batch, (list, tuple)):
        return batch, kind._make if hasattr(kind, "_make") else kind
    if isinstance(batch, Mapping):
        return [batch[key] for key in batch], lambda values: _mapping_with(batch, values)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
        return [getattr(batch, name) for name in names], lambda values: _dataclass_with(batch, names, values)
    return None


def _mapping_with(mapping: Any, values: list[Any]) -> Any:
    """A copy of a mapping with these values; a dict or UserDict (such as BatchEncoding) keeps its attributes."""
    items = dict(zip(mapping, values, strict=True))
    if not isinstance(mapping, (dict, UserDict)):
        return type(mapping)(items)
    new: Any = copy.copy(mapping)
    if getattr(mapping, "__dict__", None) is mapping:  # a dict whose keys are also its attributes
        new.__dict__ = new
    for key, value in items.items():
        new[key] = value
    return new


def _dataclass_with(instance: Any, names: list[str], values: list[Any]) -> Any:
    """A copy with new fields. Bypasses the constructor, which may not take all fields, and frozen `__setattr__`."""
    new = copy.copy(instance)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
    return new


_LEAVES = frozenset({str, bytes, int, float, bool, complex, type(None)})


class MicroBatch(NamedTuple):
    """A batch of samples.

    last: whether it is a training step's last. real: False for a dummy that keeps this rank in step with the others.
    positions: the place of each sample in its global batch or, in an evaluation, in its set: independent of how the
    samples are cut and spread over ranks. piece: `piece(start, end)` is the batch of only its samples [start, end), on
    the device.
    """

    data: Any
    last: bool
    real: bool
    positions: Sequence[int]
    piece: Callable[[int, int], Any]
    bucket: int = 0  # see `bucket_of`

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.positions)


def cut(indices: Sequence[int], size: int, least: int = 0, fewest: int = 1) -> list[Sequence[int]]:
    """Split indices into micro-batches of `size` samples, see `ranges`; if that gives fewer than `least`, into `least`
    whose sizes differ by at most one: 10 in 3 gives 4, 3, 3. With fewer samples than that, the last are empty.

    fewest: samples that the model needs at once. If one of the micro-batches would have fewer, some are empty instead,
    unless all samples together are fewer. Choose `size` with `size_for`, so that this is rare.
    """
    pieces = [indices[start:end] for start, end in ranges(0, len(indices), size)]
    if len(pieces) >= least and (fewest == 1 or min(map(len, pieces)) >= fewest):
        return pieces
    count = max(len(pieces), least)
    filled = min(count, max(1, len(indices) // fewest))
    parts = [indices[slice(*own_part(len(indices), part, filled))] for part in range(filled)]
    return [*parts, *([indices[:0]] * (count - filled))]


def size_for(samples: int, size: int, fewest: int) -> int:
    """The size to split these samples by, so that no micro-batch has less than `fewest`: `size`, or the next smaller
    one, or, where none is small enough, the next larger. 65 samples by 2 leave one, so they are split by 3.
    """
    if fewest == 1 or samples <= size:
        return size
    for candidate in (*range(size, fewest - 1, -1), *range(size + 1, samples)):
        shortest = min(end - start for start, end in ranges(0, samples, candidate))
        if shortest >= fewest:
            return candidate
    return samples


def ranges(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Split [start, end) into ranges of `size`; the last holds the remainder. Computed lazily.

    A remainder of one sample takes a second one from its neighbour: BatchNorm cannot normalise a single value.
    """
    while start < end:
        stop = min(end, start + size)
        if end - stop == 1 and size > 2:
            stop -= 1
        yield start, stop
        start = stop


def own_part(samples: int, part: int, parts: int) -> tuple[int, int]:
    """[start, end) of a part of consecutive samples. The first parts may have one more than the others."""
    least, more = divmod(samples, parts)
    return part * least + min(part, more), (part + 1) * least + min(part + 1, more)


def pieces_of(micro: MicroBatch, ranges: Sequence[Sequence[int]], fewest: int = 1) -> Iterator[MicroBatch]:
    """The micro-batches for these ranges of a larger one's samples.

    An empty range gives `fewest` dummy samples (`real=False`) for a forward and backward that other ranks wait for.
    """
    for number, piece in enumerate(ranges, start=1):
        start, end = (piece[0], piece[-1] + 1) if piece else (0, min(fewest, micro.samples))
        is_last, is_real = micro.last and number == len(ranges), micro.real and len(piece) > 0

        def own(first: int, last: int, start: int = start) -> Any:
            return micro.piece(start + first, start + last)

        yield MicroBatch(micro.piece(start, end), is_last, is_real, micro.positions[start:end], own, micro.bucket)
