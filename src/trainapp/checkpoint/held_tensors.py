"""The tensors that a model, a task or a data set holds in plain attributes, lists and dicts, but for modules' own."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.checkpoint.stateful import DEPTH, children
from trainapp.parallel.strategy import local
from trainapp.torch_private import MODULE_ATTRIBUTES

MOST_LOOKED_INTO = 20_000  # objects of each root, those close to it first: tensors beyond them are not found
MOST_PLAIN = 1000  # items of a container whose first and last are plain values: longer ones are tables
_PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)


def held_tensors(roots: Iterable[Any], with_modules: bool = False) -> Iterator[Tensor]:
    """Each of them once per place that holds it. Takes some microseconds per attribute.

    with_modules: with the parameters and buffers of modules, such as a teacher's; else they are left out unless they
    are also held elsewhere.
    """
    seen: set[int] = set()
    for root in roots:
        yield from _held_by(root, seen, with_modules)


def _held_by(root: Any, seen: set[int], with_modules: bool) -> Iterator[Tensor]:
    """Breadth first, so that a large table hides nothing that is closer. seen: ids of what needs no second look."""
    waiting, looked_into = deque([(root, 0)]), 0
    while waiting:
        held, depth = waiting.popleft()
        if isinstance(held, Tensor):
            if _has_storage(held):
                yield held
            continue
        if isinstance(held, _PLAIN) or id(held) in seen or looked_into >= MOST_LOOKED_INTO:
            continue
        looked_into += 1
        seen.add(id(held))
        if isinstance(held, nn.Module):
            if with_modules:
                yield from filter(_has_storage, (*held.parameters(), *held.buffers()))
            modules = list(held.modules())
            seen.update(map(id, modules))
            waiting += [(value, depth + 1) for module in modules for value in _attributes(module)]
        elif depth < DEPTH:
            waiting += [(value, depth + 1) for value in _contents(held)]


def _has_storage(tensor: Tensor) -> bool:
    """Whether it has any: the parameters of a lazy module do not, before they have a shape."""
    try:
        return tensor.layout is not torch.strided or local(tensor).untyped_storage() is not None
    except (ValueError, RuntimeError, NotImplementedError):
        return False


def _attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in list(vars(module).items()) if name not in MODULE_ATTRIBUTES]


def _contents(held: Any) -> list[Any]:
    if not isinstance(held, (list, tuple, deque, set, frozenset, dict)):
        return [value for _, value in children(held)]
    items = list(held.values() if isinstance(held, dict) else held)
    return [] if len(items) > MOST_PLAIN and all(map(_is_plain, (items[0], items[-1]))) else items


def _is_plain(item: Any) -> bool:
    """A value, or a record of values."""
    return isinstance(item, _PLAIN) or (isinstance(item, (tuple, list)) and all(isinstance(i, _PLAIN) for i in item))
