"""Plain values, which `torch.load(weights_only=True)` reads without executing code: numbers, strings, tensors, and
dicts, lists, tuples and sets of them. NumPy arrays and scalars are stored as tensors.
"""

import hashlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.torch_private import strided_parts

# The only key of a dict that stands for a NumPy array or scalar.
_ARRAY = "trainapp.array"
_SCALAR = "trainapp.scalar"
_LEAVES = (type(None), bool, int, float, complex, str, torch.dtype, torch.Size)
_SEQUENCES = (list, tuple, set)
_DICTS = (dict, OrderedDict, Counter)


def encoded(value: Any, name: str) -> Any:
    """Return a copy that `torch.load(weights_only=True)` can read, with tensors on the host.

    Raises UserError for values that a checkpoint cannot hold, when saving, since when loading it would be too late.

    Args:
        value: any value.
        name: the value's name, for the message.
    """
    # Leaves
    kind = type(value)
    if kind in _LEAVES or (kind is bytes and value):  # `torch.load` rejects empty ones
        return value
    if kind in (Tensor, torch.nn.Parameter):
        return value.detach().resolve_conj().resolve_neg().cpu().clone()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        key = _ARRAY if kind is np.ndarray else _SCALAR
        return {key: torch.from_numpy(np.array(value, order="C"))}

    # Containers
    if kind in _DICTS:
        items = {}
        for key, item in value.items():
            encoded_key = encoded(key, f"a key of {name}")
            items[encoded_key] = encoded(item, f"{name}[{key!r}]")
        return kind(items)
    if kind in _SEQUENCES:
        return kind(encoded(item, f"{name}[{index}]") for index, item in enumerate(value))

    raise UserError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it takes tensors, "
        "NumPy arrays, numbers, strings, None, and dicts, lists, tuples and sets of them; convert it, or set "
        "checkpointing=off"
    )


def decoded(saved: Any, device: torch.device | None = None) -> Any:
    """Return the value of which `saved` is the `encoded` form.

    Args:
        saved: an encoded value.
        device: device to move tensors to; None: tensors are not copied.
    """
    if isinstance(saved, Tensor):
        if device is None:
            return saved
        return saved.to(device)
    if isinstance(saved, dict):
        # One that stands for a NumPy value, or an ordinary one.
        if len(saved) == 1 and saved.get(_ARRAY) is not None:
            return saved[_ARRAY].numpy()
        if len(saved) == 1 and saved.get(_SCALAR) is not None:
            return saved[_SCALAR].numpy()[()]
        items = {key: decoded(item, device) for key, item in saved.items()}
        return type(saved)(items)
    if type(saved) in _SEQUENCES:
        return type(saved)(decoded(item, device) for item in saved)
    return saved


def digest(value: Any) -> str:
    """Return a digest of an encoded value: equal for equal types and bits. Ignores the order of dicts and sets."""
    hasher = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, Tensor):
        # A sparse tensor has several parts.
        hasher.update(f"{value.dtype}{value.layout}{tuple(value.shape)}".encode())
        for part in strided_parts(value):
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            part_bytes = part.contiguous().reshape(-1).view(torch.uint8)
            hasher.update(part_bytes.numpy().data)
    elif isinstance(value, dict):
        # Sorted: the order of insertion does not count.
        digests = sorted(digest(key) + digest(item) for key, item in value.items())
        hasher.update("".join(digests).encode())
    elif type(value) in _SEQUENCES:
        digests = [digest(item) for item in value]
        if isinstance(value, set):
            digests.sort()
        hasher.update("".join(digests).encode())
    else:
        hasher.update(repr(value).encode())
    return hasher.hexdigest()
