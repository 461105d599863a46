"""Values in attributes that a snapshot restores: plain ones, tensors and arrays, and containers of them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.state.attributes import CONTAINERS
from trainapp.state.stateful import DEPTH, MOST_ITEMS, can_be_restored

PLAIN: tuple[type[Any], ...] = (
    *(type(None), bool, int, float, complex, str, bytes, set),
    *(np.ndarray, np.generic, torch.device),
)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether the value is plain, a tensor to restore, or a container of such values."""
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, Tensor):
        return is_restorable(value) and not value.requires_grad
    if not isinstance(value, CONTAINERS) or depth >= DEPTH or len(value) > MOST_ITEMS:
        return False
    items = value.values() if isinstance(value, dict) else value
    for item in items:
        if isinstance(item, PLAIN):  # most of them: saves a call
            continue
        if not is_plain(item, depth + 1):
            return False
    return True


def is_restorable(value: Any) -> bool:
    """Return whether the value is a tensor to restore: not a result whose graph still exists."""
    return type(value) is Tensor and value.grad_fn is None and can_be_restored(value)


def restorable_tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors to restore in a tuple, also in tuples in it. What lists and dicts hold is the user's."""
    tensors = []
    for value in values:
        if type(value) is Tensor and is_restorable(value):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors.extend(restorable_tensors(value))
    return tensors
