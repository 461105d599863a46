"""Batches: any pytree of tensors, and how its samples are split into micro-batches.

Tensors may lie in arbitrarily nested containers, and which dimension holds the samples is unknown. Containers are dicts
and other mappings, lists, tuples, namedtuples, dataclasses, and the types registered with `torch.utils._pytree`, such
as TensorDict. Strings, numbers, None and objects of unknown types pass through untouched.
"""

import copy
import dataclasses
import functools
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from trainapp.torch_private import registered_container

Rebuild = Callable[[list[Any]], Any]  # makes a container of the same type with new children

_PLAIN_TYPES = frozenset({str, bytes, int, float, bool, complex, type(None)})


# --- pytrees


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return the batch with `function(tensor)` in place of every tensor; containers keep their types."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    flattened = flatten_container(batch)
    if flattened is None:
        return batch
    children, rebuild = flattened
    return rebuild([map_tensors(function, child) for child in children])


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """Return the batch's tensors, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    flattened = flatten_container(batch)
    if flattened is None:
        return []
    children, _ = flattened
    tensors: list[torch.Tensor] = []
    for child in children:
        tensors.extend(tensors_in(child))
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
    """Return the batch with `compact` tensors. One that occurs twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def compact_once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = compact(tensor)
        return copies[id(tensor)]

    return map_tensors(compact_once, batch)


def elements_in(batch: Any) -> int:
    """Return the number of elements in all of the batch's tensors."""
    return sum(tensor.numel() for tensor in tensors_in(batch))


def flatten_container(batch: Any) -> tuple[Sequence[Any], Rebuild] | None:
    """Return a container's children, and a function that rebuilds it from new ones; None if `batch` is no container."""
    kind = type(batch)
    if kind in _PLAIN_TYPES:
        return None
    if kind is PackedSequence:  # a namedtuple whose `batch_sizes` must stay on the CPU
        packed = (batch.data, batch.sorted_indices, batch.unsorted_indices)
        return packed, lambda children: PackedSequence(children[0], batch.batch_sizes, *children[1:])
    registered = registered_container(kind)  # also dict, list and tuple themselves, but not their subclasses
    if registered is not None:
        children, context = registered.flatten_fn(batch)
        return children, lambda children: registered.unflatten_fn(children, context)
    if isinstance(batch, (list, tuple)):
        make: Any = getattr(kind, "_make", kind)  # a namedtuple's constructor takes its fields one by one
        return batch, make
    if isinstance(batch, Mapping):
        values = [batch[key] for key in batch]
        return values, functools.partial(_mapping_with, batch)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
        values = [getattr(batch, name) for name in names]
        return values, functools.partial(_dataclass_with, batch, names)
    return None


def _mapping_with(mapping: Any, values: list[Any]) -> Any:
    """Return a copy of a mapping with these values; a dict or UserDict (such as BatchEncoding) keeps its attributes."""
    new_items = dict(zip(mapping, values, strict=True))
    if not isinstance(mapping, (dict, UserDict)):
        return type(mapping)(new_items)

    # A copy, so that attributes beside the items stay.
    new_mapping: Any = copy.copy(mapping)
    if getattr(mapping, "__dict__", None) is mapping:  # a dict whose keys are also its attributes
        new_mapping.__dict__ = new_mapping
    for key, value in new_items.items():
        new_mapping[key] = value
    return new_mapping


def _dataclass_with(instance: Any, names: list[str], values: list[Any]) -> Any:
    """Return a copy with new fields. Bypasses the constructor, which may not take all fields, and frozen
    `__setattr__`.
    """
    new_instance = copy.copy(instance)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new_instance, name, value)
    return new_instance


# --- micro-batches


class MicroBatch(NamedTuple):
    """A batch of samples."""

    data: Any
    last: bool  # whether it is a training step's last
    real: bool  # False for a dummy that keeps this rank in step with the others
    # The place of each sample in its global batch or, in an evaluation, in its set: independent of how the samples are
    # split and spread over ranks.
    positions: Sequence[int]
    # `slice_samples(start, end)`: the batch of only its samples [start, end), on the device
    slice_samples: Callable[[int, int], Any]
    bucket: int = 0  # see `bucket_of`

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.positions)


def bucket_of(samples: int, elements: int) -> int:
    """Return the bucket of a shape: the elements per sample, rounded up to a power of two."""
    elements_per_sample = max(1, -(-elements // samples))  # rounded up
    return 1 << (elements_per_sample - 1).bit_length()


def split_indices(indices: Sequence[int], size: int, at_least: int = 0, fewest: int = 1) -> list[Sequence[int]]:
    """Split indices into those of each micro-batch.

    Args:
        indices: of the samples.
        size: samples per micro-batch; `ranges` says where the remainder goes.
        at_least: if `size` gives fewer micro-batches, there are this many instead, whose sizes differ by at most one:
            10 in 3 gives 4, 3, 3. With fewer samples than that, the last are empty.
        fewest: samples that the model needs at once. If one of the micro-batches would have fewer, some are empty
            instead, unless all samples together are fewer. Choose `size` with `size_for`, so that this is rare.
    """
    # Usually micro-batches of `size` and the remainder are enough.
    parts = [indices[start:end] for start, end in ranges(0, len(indices), size)]
    if len(parts) >= at_least and all(len(part) >= fewest for part in parts):
        return parts

    # Otherwise spread the samples evenly over as many as they can fill, and leave the last ones empty.
    part_count = max(len(parts), at_least)
    filled_count = min(part_count, max(1, len(indices) // fewest))
    even_parts = []
    for number in range(filled_count):
        start, end = part_bounds(len(indices), number, filled_count)
        even_parts.append(indices[start:end])
    no_indices = indices[:0]
    return even_parts + [no_indices] * (part_count - filled_count)


def size_for(samples: int, size: int, fewest: int) -> int:
    """Return the size to split these samples by, so that no micro-batch has less than `fewest`: `size`, or the next
    smaller one, or, where none is small enough, the next larger. 65 samples by 2 leave one, so they are split by 3.
    """
    if fewest == 1 or samples <= size:
        return size

    # Smaller sizes first: they need no more memory than the one that was chosen.
    no_larger_sizes = range(size, fewest - 1, -1)
    larger_sizes = range(size + 1, samples)
    for candidate in itertools.chain(no_larger_sizes, larger_sizes):
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


def part_bounds(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Return [start, end) of a part of consecutive samples. The first parts may have one more than the others."""
    per_part, remainder = divmod(samples, parts)
    start = part * per_part + min(part, remainder)
    end = (part + 1) * per_part + min(part + 1, remainder)
    return start, end


def split_micro_batch(micro: MicroBatch, parts: Sequence[Sequence[int]], fewest: int = 1) -> Iterator[MicroBatch]:
    """Split a micro-batch into smaller ones.

    Args:
        micro: the larger micro-batch.
        parts: consecutive numbers of its samples for each smaller one. An empty part gives a dummy (`real=False`) for
            a forward and backward that other ranks wait for.
        fewest: the number of samples in a dummy.
    """
    for number, part in enumerate(parts, start=1):
        if part:
            start = part[0]
            end = part[-1] + 1
        else:  # a dummy computes on the first samples, whose loss does not count
            start = 0
            end = min(fewest, micro.samples)
        yield MicroBatch(
            data=micro.slice_samples(start, end),
            last=micro.last and number == len(parts),
            real=micro.real and len(part) > 0,
            positions=micro.positions[start:end],
            slice_samples=functools.partial(_slice_after, micro.slice_samples, start),
            bucket=micro.bucket,
        )


def _slice_after(slice_samples: Callable[[int, int], Any], first: int, start: int, end: int) -> Any:
    """Return the slice [start, end) of the samples that begin with number `first`."""
    return slice_samples(first + start, first + end)
