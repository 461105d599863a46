"""Batches of any structure: tensors in nested dicts, lists and tuples whose first dimension is the samples."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """`function` of every tensor in nested dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def shape_of(batch: Any) -> int:
    """The bucket of a batch's shape: the numbers in one sample, rounded up to a power of two. 0 without tensors."""
    tensors = list(tensors_in(batch))
    samples = batch_length(batch)
    if not samples:
        return 0
    return 1 << max(0, math.ceil(math.log2(max(1, sum(t.numel() for t in tensors) / samples))))


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor."""
    first = next(tensors_in(batch), None)
    return 0 if first is None or first.ndim == 0 else len(first)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_in(value)


def narrow(batch: Any, start: int, length: int, samples: int) -> Any:
    """Samples [start, start + length) of a batch of `samples`: views, no copies."""
    if isinstance(batch, torch.Tensor):
        return batch[start : start + length] if batch.ndim and len(batch) == samples else batch
    if isinstance(batch, dict):
        return {key: narrow(value, start, length, samples) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(narrow(value, start, length, samples) for value in batch)
    return batch
