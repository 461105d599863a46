"""The tensors that a model, a task or a data set holds in plain attributes, lists and dicts, but for modules' own."""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainapp.checkpoint.stateful import DEPTH, children
from trainapp.memory.kept import Kept
from trainapp.models.inspect import MODULE_ATTRIBUTES

MOST_LOOKED_INTO = 100_000  # objects: what a large data set holds beyond them is not found
MOST_PLAIN = 1000  # items of a container that begins with a plain value: longer ones are tables
_PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)


def kept_of(roots: Mapping[str, Any]) -> Kept:
    """What model and task keep from step to step, apart from what the data sets hold. roots: as `Stateful.roots`."""
    of_data = [root for name, root in roots.items() if name.endswith("data")]
    others = [root for name, root in roots.items() if not name.endswith("data")]
    return Kept(functools.partial(held_tensors, others), functools.partial(held_tensors, of_data))


def held_tensors(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Each of them once per place that holds it. Parameters and buffers of modules are left out, unless they are also
    held elsewhere. Takes some microseconds per attribute.
    """
    waiting: list[tuple[Any, int]] = [(root, 0) for root in roots]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_LOOKED_INTO:
        held, depth = waiting.pop()
        if isinstance(held, Tensor):
            yield held
        elif not isinstance(held, _PLAIN) and id(held) not in seen:
            seen.add(id(held))
            if isinstance(held, nn.Module):
                modules = list(held.modules())
                seen.update(map(id, modules))
                waiting += [(value, depth + 1) for module in modules for value in _attributes(module)]
            elif depth < DEPTH:
                waiting += [(value, depth + 1) for value in _contents(held)]


def _attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES]


def _contents(held: Any) -> Iterable[Any]:
    if isinstance(held, (list, tuple, deque, set, frozenset, dict)):
        items = held.values() if isinstance(held, dict) else held
        is_table = len(held) > MOST_PLAIN and isinstance(next(iter(items)), _PLAIN)
        return () if is_table else items
    return (value for _, value in children(held))
