"""Batches of any structure: tensors in nested dicts, lists and tuples whose first dimension is the samples."""

from collections.abc import Callable
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


def measure(batch: Any) -> tuple[int, int]:
    """Samples in a batch (the first dimension of its first tensor), and the numbers in all its tensors."""
    tensors = tensors_in(batch)
    samples = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
    return samples, sum([t.numel() for t in tensors])


def bucket_of(samples: int, numbers: int) -> int:
    """The bucket of a shape: the numbers in one sample, rounded up to a power of two. 0 without samples."""
    return 1 << (max(1, -(-numbers // samples)) - 1).bit_length() if samples else 0


def batch_length(batch: Any) -> int:
    """Samples in a batch."""
    return measure(batch)[0]


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return []
    found = []
    for value in batch:
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            found += tensors_in(value)
    return found
