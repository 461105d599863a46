"""States as plain values and tensors: what a checkpoint may hold, for it is loaded without executing anything."""

import hashlib
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TAG = "trainapp.kind"  # the key that marks an encoded container


def encoded(state: Any, name: str) -> Any:
    """A copy of plain values and tensors on the host. Raises TypeError, naming what is neither."""
    if isinstance(state, Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, np.generic):
        return {_TAG: "scalar", "dtype": state.dtype.str, "items": state.tobytes()}
    if isinstance(state, np.ndarray) and state.dtype.kind in "biufc":
        return {_TAG: "array", "dtype": state.dtype.str, "shape": list(state.shape), "items": state.tobytes()}
    if isinstance(state, dict):
        items = [[encoded(key, name), encoded(value, f"{name}.{key}")] for key, value in state.items()]
        return {_TAG: "dict", "items": items}
    for kind, label in _CONTAINERS.items():
        if type(state) is kind:
            items = [encoded(value, f"{name}.{number}") for number, value in enumerate(state)]
            return {_TAG: label, "items": items, "most": getattr(state, "maxlen", None)}
    if state is None or type(state) in (bool, int, float, complex, str, bytes):
        return state
    raise TypeError(
        f"the state of {name} is a {type(state).__name__}: a checkpoint holds numbers, strings, tensors, arrays and "
        "lists, tuples, sets, deques and dicts of them; convert it where the state is returned"
    )


_CONTAINERS = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}


def decoded(saved: Any) -> Any:
    """The inverse of `encoded`; a dict of another class comes back as a dict."""
    if not isinstance(saved, dict):
        return saved
    kind, items = saved[_TAG], saved["items"]
    if kind == "scalar":
        return np.frombuffer(items, saved["dtype"])[0]
    if kind == "array":
        return np.frombuffer(items, saved["dtype"]).reshape(saved["shape"]).copy()
    if kind == "dict":
        return {decoded(key): decoded(value) for key, value in items}
    values = map(decoded, items)
    if kind == "deque":
        return deque(values, saved["most"])
    return {label: container for container, label in _CONTAINERS.items()}[kind](values)


def digest(state: Any) -> str:
    """Equal for equal encoded states."""
    hasher = hashlib.sha256()
    _update(hasher, state)
    return hasher.hexdigest()


def _update(hasher: Any, state: Any) -> None:
    if isinstance(state, Tensor):
        hasher.update(f"{state.dtype}{tuple(state.shape)}".encode())
        hasher.update(state.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(state, (list, dict)):
        items = state if isinstance(state, list) else [part for item in state.items() for part in item]
        hasher.update(f"{type(state).__name__}{len(items)}".encode())
        for item in items:
            _update(hasher, item)
    else:
        hasher.update(f"{type(state).__name__}{state!r};".encode())
