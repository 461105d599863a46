"""State outside of tensors that a trace cannot follow: what a model or its task counts or draws may decide what a later
step does.
"""

import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.checkpoint.plain import digest, encoded
from trainapp.rng import generator_state, is_generator
from trainapp.torch_private import outside_dispatch_modes
from trainapp.train.exactness import Snapshot, attributes_of, differences, plain_leaf

_KNOWN = ("torch", "trainapp", "builtins")
_OPEN = ("builtins", "collections", "functools", "itertools", "types", "dataclasses")  # of the standard library


def moving_state(roots: Mapping[str, Any]) -> Snapshot:
    """What is in attributes of the model and the task, in those of their classes, and in global variables beside these,
    by path; of tensors, which have no values here, the shapes.

    roots: as in `Stateful`. A data set's is not looked at: in a trace it gives fewer batches than in a run.
    """
    own = {name: held for name, held in roots.items() if not name.endswith("data")}
    with outside_dispatch_modes():  # checksums of arrays are tensors
        return attributes_of(own | _shared(own.values()), _leaf)


def moved(before: Snapshot, after: Snapshot) -> list[str]:
    """The names of those that differ, with what is new or gone."""
    return sorted(name.removeprefix("model.") for name in differences(before, after))


def _shared(roots: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Attributes of users' classes, and global variables of the files that define them: by the name of either."""
    parts = itertools.chain.from_iterable(root.modules() if isinstance(root, nn.Module) else [root] for root in roots)
    found: dict[str, dict[str, Any]] = {}
    for kind in {type(part) for part in parts}:
        if kind.__module__.partition(".")[0] in _KNOWN:
            continue
        found[kind.__qualname__] = _variables(vars(kind))
        found[kind.__module__] = _variables(vars(sys.modules.get(kind.__module__, kind)))
    return found


def _variables(held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in held.items()
        if not name.startswith("__") and not callable(value) and not isinstance(value, (types.ModuleType, property))
    }


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, torch.Generator):
        return None  # what it draws is a tensor: to decide anything, that is read
    if is_generator(value):
        return digest(encoded(generator_state(value), ""))
    package = type(value).__module__.partition(".")[0]
    if package == "trainapp" or (package in sys.stdlib_module_names and package not in _OPEN):
        return None  # what checkpointed blocks know; loggers, locks, files
    if isinstance(value, Iterator):
        return object()  # unlike any other: nothing tells how far it is
    return plain_leaf(value)
