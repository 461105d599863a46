"""What differs between two records of values: in the first steps, which state a forward changes."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.state.attributes import CONTAINERS, RESULT, fingerprint, storages_of
from trainapp.state.plain_values import PLAIN
from trainapp.state.structure import Structure
from trainapp.state.walk import is_iterator
from trainapp.torch_private import MODULE_ATTRIBUTES


def container_fingerprints(structure: Structure) -> list[dict[str, Any]]:
    """Return fingerprints of the containers and iterators in the attributes of modules, then of objects, and of the
    tensors and arrays there that are too large to be copied.
    """
    tensors = [*structure.parameters.values(), *structure.buffers.values(), *structure.constants.values()]
    registered = storages_of(tensors)
    too_large = structure.held.too_large_values()
    fingerprints = []
    for index, attributes in enumerate((*structure.attributes, *structure.objects), start=len(structure.registries)):
        compared: dict[str, Any] = {}
        for name, value in () if structure.is_of_library(index) else attributes.items():
            is_compared = isinstance(value, CONTAINERS) or is_iterator(value) or id(value) in too_large
            if is_compared and name not in MODULE_ATTRIBUTES:
                compared[name] = fingerprint(value, registered)
        fingerprints.append(compared)
    return fingerprints


def with_updates(values: list[dict[str, Any]], updates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**attributes, **update} for attributes, update in zip(values, updates, strict=True)]


def changed_names(
    before: dict[str, Any], now: dict[str, Any], copies: Mapping[int, Any], with_results: bool = False
) -> list[str]:
    """Return the names whose values differ.

    Args:
        before: the values then.
        now: the values now.
        copies: earlier values, by the object's id.
        with_results: also those with a graph: in a registered buffer they are state, in an attribute left for the loss.
    """
    names = []
    for name in before | now:
        old = before.get(name)
        new = now.get(name)
        is_result = new is RESULT or getattr(new, "grad_fn", None) is not None
        if (with_results or not is_result) and not _is_equal(copies.get(id(old), old), new):
            names.append(name)
    return names


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal. Tensors without memory are; other objects, only if they are the same."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if not has_memory(a):
            return True
        return a.shape == b.shape and torch.equal(a, b.to(a))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return False
        return all(_is_equal(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, np.ndarray) and a.dtype.hasobject:  # the objects are compared as those of a list are
        return a.shape == b.shape and all(map(_is_equal, a.flat, b.flat))
    return isinstance(a, PLAIN) and np.array_equal(a, b)


def has_memory(tensor: Tensor) -> bool:
    """Return whether the tensor has memory that can be copied: not sparse, nested, meta or fake."""
    is_usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_usual and not tensor.is_nested and not tensor.is_meta
