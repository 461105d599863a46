"""Whether a value of a user's class has changed since, in place or otherwise, without a copy of it."""

import inspect
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_Seen = dict[int, tuple[int, Any]]  # by id: a number, and the object, so that no other one gets its id
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def fingerprint(value: Any) -> Any:
    """Equals an earlier one of the same value if nothing in it has changed.

    Objects count by what they would pickle. Optimizers, modules, functions, classes and what has no pickle count by
    their identity.
    """
    return _fingerprint(value, {})


def _fingerprint(value: Any, seen: _Seen) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value)  # nan equals itself
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _of_array(value)
    if id(value) in seen:
        return kind, seen[id(value)][0]
    seen[id(value)] = (len(seen), value)
    if isinstance(value, dict):
        return kind, [(_fingerprint(key, seen), _fingerprint(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return kind, [_fingerprint(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(repr, value))
    if isinstance(value, (torch.optim.Optimizer, nn.Module, type)) or inspect.isroutine(value):
        return kind, id(value)
    try:
        pickled = value.__reduce_ex__(4)
    except Exception:  # no pickle; it may raise anything
        return kind, id(value)
    if isinstance(pickled, str):
        return kind, pickled
    parts = [list(part) if isinstance(part, Iterator) else part for part in pickled[1:]]
    return kind, [_fingerprint(part, seen) for part in parts]


def _of_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            value = value.to_dense()
        value = value.detach().cpu().contiguous()
        return type(value), value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return type(value), value.dtype.str, value.shape, value.tobytes()
