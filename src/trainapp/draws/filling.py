"""Fills a tensor with the random numbers of its samples, a bounded block at a time.

The last dimension of a sample is one stream of the counter-based generator: a row. The other coordinates of the row in
the sample are part of its key, so longer or more rows, such as those of padding, do not change the others.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainapp.draws.counter_based import BLOCK
from trainapp.draws.layout import DrawLayout
from trainapp.draws.splitmix64 import hashed, signed

# A distribution of `counter_based`: (keys [k, 1], first element, count, dtype, *arguments) -> [k, count].
Distribution = Callable[..., Tensor]


def fill_by_sample(
    distribution: Distribution, target: Tensor, layout: DrawLayout, keys: Tensor, arguments: Sequence[Any]
) -> Tensor:
    """Fill a tensor and return it.

    Args:
        distribution: makes the numbers.
        target: the tensor, with at least one element.
        layout: where it has the samples.
        keys: of the samples, int64 [samples, 1].
        arguments: of the distribution: numbers, or tensors that expand to the target.
    """
    # Views by sample, of the target and of arguments that are tensors.
    samples = len(keys)
    by_sample = layout.split(target, samples)
    row_offsets = _row_offsets(by_sample.shape[1:-1], target.device)
    split_arguments = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            argument = layout.split(argument.expand_as(target), samples)
        split_arguments.append(argument)

    # As many samples at a time as a block holds.
    elements_per_sample = target.numel() // samples
    samples_per_block = max(1, BLOCK[target.device.type] // elements_per_sample)
    for start, end in _ranges(samples, samples_per_block):
        row_keys = (keys[start:end] + row_offsets).view(-1, 1)
        block_arguments = [_sliced(argument, slice(start, end)) for argument in split_arguments]
        _fill_samples(distribution, by_sample[start:end], row_keys, block_arguments)
    return target


def _row_offsets(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return what the coordinates of each row add to its sample's key, int64, flat.

    Args:
        shape: of a sample, without the last dimension.
        device: of the result.
    """
    offsets = torch.zeros(list(shape), dtype=torch.int64, device=device)
    for dimension, size in enumerate(shape):
        steps = torch.arange(size, device=device) * coordinate_step(dimension + 1)

        # Broadcast over the other dimensions.
        later_dimensions = len(shape) - dimension - 1
        offsets.add_(steps.view(-1, *[1] * later_dimensions))
    return offsets.flatten()


def coordinate_step(dimension: int) -> int:
    """Return what a row's coordinate in this dimension of a sample, counted from 1, adds to its key, per unit."""
    return signed(hashed(dimension) | 1)  # odd, so that no two coordinates add the same


def _fill_samples(distribution: Distribution, block: Tensor, row_keys: Tensor, arguments: Sequence[Any]) -> None:
    """Fill some samples, [samples, rows, ...]. A sample that is larger than a block is filled in parts of its rows."""
    # The samples as one list of rows.
    width = block.shape[-1]
    try:
        rows = block.view(-1, width)
        is_copy = False
    except RuntimeError:  # the strides allow no such view
        rows = block.new_empty(len(row_keys), width)
        is_copy = True

    arguments = [argument.reshape(-1, width) if isinstance(argument, Tensor) else argument for argument in arguments]

    # Some rows at a time, or a part of a row that is longer than a block.
    max_elements = BLOCK[block.device.type]
    for top, bottom in _ranges(len(rows), max(1, max_elements // width)):
        for first, last in _ranges(width, max_elements):
            part = (slice(top, bottom), slice(first, last))
            part_arguments = [_sliced(argument, part) for argument in arguments]
            keys = row_keys[top:bottom]
            rows[part] = distribution(keys, first, last - first, block.dtype, *part_arguments)
    if is_copy:
        block.copy_(rows.view(block.shape))


def _sliced(argument: Any, part: Any) -> Any:
    """Return this part of an argument that is a tensor, and any other argument as it is."""
    return argument[part] if isinstance(argument, Tensor) else argument


def _ranges(end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, end) of at most `size` that divide range(end)."""
    for start in range(0, end, size):
        yield start, min(end, start + size)
