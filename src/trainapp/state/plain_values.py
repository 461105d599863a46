"""Values in attributes that a snapshot restores: plain ones, tensors and arrays, the user's objects, and containers of
all these.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.state.attributes import CONTAINERS
from trainapp.state.contents import is_users_object
from trainapp.state.stateful import can_be_restored
from trainapp.state.walk import DEPTH, MOST_ITEMS

PLAIN: tuple[type[Any], ...] = (
    *(type(None), bool, int, float, complex, str, bytes, set),
    *(np.ndarray, np.generic, torch.device),
)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether the value is plain, a tensor to restore, a user's object, or a container of such values."""
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, Tensor):
        return is_restorable(value) and not value.requires_grad
    if not isinstance(value, CONTAINERS):
        return is_users_object(value)
    if len(value) > MOST_ITEMS:  # rows of data
        return True
    if depth >= DEPTH:
        return False
    items = value.values() if isinstance(value, dict) else value
    for item in items:
        if isinstance(item, PLAIN):  # most of them: saves a call
            continue
        if isinstance(item, Tensor):  # not copied: whether it could be need not be asked, which takes 10 us
            if item.requires_grad:
                return False
        elif not is_plain(item, depth + 1):
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
