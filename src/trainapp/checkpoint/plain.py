"""Plain values: what a checkpoint may hold in addition to its shards, since reading it executes nothing.

`torch.load(weights_only=True)` reads numbers, strings, tensors, and dicts, lists and tuples of them. `encoded` writes
the rest, such as arrays and sets, as dicts with a tag.
"""

import hashlib
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.torch_private import strided_parts

_TAG = "trainapp.kind"  # the key that marks what is encoded as a dict
_KEYS = (type(None), bool, int, float, complex, str)
_LEAVES = (*_KEYS, torch.dtype, torch.Size)
_TENSORS = (Tensor, torch.nn.Parameter)
_ITEMS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "defaultdict"}
_UNORDERED = ("set", "frozenset", "dict", "counter", "defaultdict")
_FACTORIES = {kind.__name__: kind for kind in (int, float, complex, bool, str, list, tuple, set, dict)}


def encoded(value: Any, name: str, strict: bool = True) -> Any:
    """A copy that `torch.load(weights_only=True)` can read, with tensors on the host.

    name: of the value, for the message. Raises UserError for what a checkpoint cannot hold: to be called when saving,
    since when loading it would be too late. strict=False: that stays in the copy, which then serves `digest` alone.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is bytes:
        return value or {_TAG: "bytes", "items": []}  # `torch.load` refuses how empty ones are pickled
    if kind in _TENSORS:
        return value.detach().resolve_conj().resolve_neg().cpu().clone()
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUMm" and value.nbytes:
        return {_TAG: "scalar", "dtype": value.dtype.str, "items": value.tobytes()}
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "items": value.tobytes() or None}
    if kind in _DICTS or (isinstance(value, dict) and not strict):
        return _encoded_dict(value, name, strict)
    if kind in _ITEMS or (isinstance(value, tuple(_ITEMS)) and not strict):
        items = [encoded(item, f"{name}[{number}]", strict) for number, item in enumerate(value)]
        if kind in (list, tuple):
            return kind(items)
        return {_TAG: _ITEMS.get(kind, str(kind)), "items": items, "most": getattr(value, "maxlen", None)}
    if strict:
        raise _not_plain(kind, name)
    return value


def _encoded_dict(value: dict[Any, Any], name: str, strict: bool) -> dict[Any, Any]:
    kind = type(value)
    factory = getattr(value, "default_factory", None)
    label = getattr(factory, "__name__", None)
    if factory is not None and _FACTORIES.get(str(label)) is not factory:
        if strict:
            raise _not_plain(kind, f"{name}, with default_factory={label},")
        label = str(id(factory))
    if kind in (dict, OrderedDict) and _TAG not in value and all(type(key) in _KEYS for key in value):
        return kind((key, encoded(item, f"{name}[{key!r}]", strict)) for key, item in value.items())
    items = [
        [encoded(key, f"a key of {name}", strict), encoded(item, f"{name}[{key!r}]", strict)]
        for key, item in value.items()
    ]
    return {_TAG: _DICTS.get(kind, str(kind)), "items": items, "factory": label}


def _not_plain(kind: type, name: str) -> UserError:
    return UserError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it takes tensors, arrays, "
        "numbers, strings, None, and dicts, lists, tuples, sets and deques of them; convert it, or set "
        "checkpointing=off"
    )


def decoded(saved: Any, device: torch.device | None = None) -> Any:
    """The inverse of `encoded`. device: for tensors, which are not copied otherwise."""
    if isinstance(saved, Tensor):
        return saved if device is None else saved.to(device)
    if type(saved) in (list, tuple):
        return type(saved)(decoded(item, device) for item in saved)
    if not isinstance(saved, dict):
        return saved
    if _TAG not in saved:
        return type(saved)((key, decoded(item, device)) for key, item in saved.items())
    kind, items = saved[_TAG], saved["items"]
    if kind == "scalar":
        return np.frombuffer(items, saved["dtype"])[0]
    if kind == "array":
        return np.frombuffer(items or b"", saved["dtype"]).reshape(saved["shape"]).copy()
    if kind == "bytes":
        return b""
    values = (decoded(item, device) for item in items)
    if kind == "defaultdict":
        return defaultdict(_FACTORIES.get(saved["factory"]), values)
    if kind == "deque":
        return deque(values, saved["most"])
    by_label = {label: container for container, label in (_ITEMS | _DICTS).items()}
    return by_label[kind](dict(values) if kind == "counter" else values)


def digest(value: Any) -> str:
    """Of an encoded value: equal for equal values, by type and bit for bit. As for `==`, the order of a dict or of a
    set does not count.
    """
    hasher = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype}{value.layout}{tuple(value.shape)}".encode())
        for part in strided_parts(value):
            hasher.update(f"{part.dtype}{tuple(part.shape)}".encode())
            hasher.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, (list, tuple, dict)) and type(value) not in _LEAVES:
        hasher.update("".join(_digests(value)).encode())
    elif type(value) in (*_LEAVES, bytes):
        hasher.update(repr(value).encode())
    else:
        hasher.update(str(id(value)).encode())
    return hasher.hexdigest()


def _digests(value: Any) -> list[str]:
    """Of the parts of a container, sorted where their order does not count."""
    if not isinstance(value, dict):
        return [digest(item) for item in value]
    if _TAG in value:
        items = value["items"]
        own = [digest(part) for name, part in sorted(value.items()) if name != "items"]
        parts = [digest(item) for item in items] if isinstance(items, list) else [digest(items)]
        return own + (sorted(parts) if value[_TAG] in _UNORDERED else parts)
    parts = [digest(key) + digest(item) for key, item in value.items()]
    return parts if type(value) is OrderedDict else sorted(parts)
