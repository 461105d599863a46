"""Plain values: what a checkpoint may hold beside its shards, since reading it executes nothing."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from trainapp.errors import UserError
from trainapp.torch_private import strided_parts

# What `torch.load(weights_only=True)` reads without being told to trust a class.
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def require_plain(value: Any, name: str) -> None:
    """Raises UserError unless `value` is a tensor, a plain value, or nested containers of them.

    To be called when saving: when loading it would be too late. name: of the value, for the message.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            require_plain(key, f"a key of {name}")
            require_plain(item, f"{name}[{key!r}]")
    elif kind in (list, tuple, set):
        for position, item in enumerate(value):
            require_plain(item, f"{name}[{position}]")
    elif kind not in _LEAVES and kind not in _TENSORS:
        raise UserError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it takes tensors, "
            "numbers, strings, None, and dicts, lists, tuples and sets of them; convert it, or set checkpointing=off"
        )


def map_plain(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of nested containers with `function` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, map_plain(function, item)) for key, item in value.items())
    if type(value) in (list, tuple, set):
        return type(value)(map_plain(function, item) for item in value)
    return value


def same(first: Any, second: Any) -> bool:
    """Whether two plain values are equal, tensors bit for bit in dtype and content."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return (
            isinstance(first, torch.Tensor)
            and isinstance(second, torch.Tensor)
            and (first.dtype, first.shape, first.device) == (second.dtype, second.shape, second.device)
            and first.layout is second.layout
            and all(map(_same_bytes, strided_parts(first), strided_parts(second)))
        )
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and (first == second or (first != first and second != second))


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
