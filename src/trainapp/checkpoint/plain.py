"""Plain values: what a checkpoint may hold in addition to its shards, since reading it executes nothing.

`torch.load(weights_only=True)` reads numbers, strings, tensors, and dicts, lists, tuples and sets of them.
NumPy's arrays and scalars are kept as tensors.
"""

import hashlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.torch_private import strided_parts

_ARRAY, _SCALAR = "trainapp.array", "trainapp.scalar"  # the only key of a dict that stands for one
_LEAVES = (type(None), bool, int, float, complex, str, torch.dtype, torch.Size)
_SEQUENCES, _DICTS = (list, tuple, set), (dict, OrderedDict, Counter)


def encoded(value: Any, name: str, strict: bool = True) -> Any:
    """A copy that `torch.load(weights_only=True)` can read, with tensors on the host.

    name: of the value, for the message. Raises UserError for what a checkpoint cannot hold: to be called when saving,
    since when loading it would be too late. strict=False: that stays in the copy, which then serves `digest` alone.
    """
    kind = type(value)
    if kind in _LEAVES or (kind is bytes and value):  # `torch.load` refuses how empty ones are pickled
        return value
    if kind in (Tensor, torch.nn.Parameter):
        return value.detach().resolve_conj().resolve_neg().cpu().clone()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return {_ARRAY if kind is np.ndarray else _SCALAR: torch.from_numpy(np.array(value, order="C"))}
    if kind in _DICTS:
        keys = (encoded(key, f"a key of {name}", strict) for key in value)
        items = (encoded(item, f"{name}[{key!r}]", strict) for key, item in value.items())
        return kind(dict(zip(keys, items, strict=True)))
    if kind in _SEQUENCES:
        return kind(encoded(item, f"{name}[{number}]", strict) for number, item in enumerate(value))
    if strict:
        raise UserError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it takes tensors, "
            "NumPy arrays, numbers, strings, None, and dicts, lists, tuples and sets of them; convert it, or set "
            "checkpointing=off"
        )
    return value


def decoded(saved: Any, device: torch.device | None = None) -> Any:
    """The inverse of `encoded`. device: for tensors, which are not copied otherwise."""
    if isinstance(saved, Tensor):
        return saved if device is None else saved.to(device)
    if isinstance(saved, dict):
        if len(saved) == 1 and (array := saved.get(_ARRAY, saved.get(_SCALAR))) is not None:
            return array.numpy() if _ARRAY in saved else array.numpy()[()]
        return type(saved)({key: decoded(item, device) for key, item in saved.items()})
    if type(saved) in _SEQUENCES:
        return type(saved)(decoded(item, device) for item in saved)
    return saved


def digest(value: Any) -> str:
    """Of an encoded value: equal for equal values, by type and bit for bit. The order of a dict or set counts for
    nothing.
    """
    hasher = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype}{value.layout}{tuple(value.shape)}".encode())
        for part in strided_parts(value):
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            hasher.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        hasher.update("".join(sorted(digest(key) + digest(item) for key, item in value.items())).encode())
    elif isinstance(value, set):
        hasher.update("".join(sorted(map(digest, value))).encode())
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        hasher.update("".join(map(digest, value)).encode())
    elif isinstance(value, (*_LEAVES, bytes)):
        hasher.update(repr(value).encode())
    else:
        hasher.update(str(id(value)).encode())
    return hasher.hexdigest()
