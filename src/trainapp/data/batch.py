"""Batches of any structure: tensors in containers nested anyhow. Which of their dimensions are samples is unknown.

Containers are dicts and other mappings, lists, tuples, namedtuples, dataclasses, and the types registered with
`torch.utils._pytree`, such as TensorDict. Strings, numbers, None and objects of unknown types pass through untouched.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from trainapp.torch_private import pytree_functions


class NodeType(NamedTuple):
    """How to open a container type: its children, and a container like the given one with other children."""

    children: Callable[[Any], Iterable[Any]]
    rebuild: Callable[[Any, list[Any]], Any]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The batch with `function(tensor)` in place of every tensor; containers keep their types and attributes.

    Raises TypeError for a mapping that can neither be copied nor built from a dict.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if type(batch) is dict:  # a fast path, a third quicker than the one below: runs for every micro-batch
        return {key: map_tensors(function, value) for key, value in batch.items()}
    node = node_type(batch)
    if node is None:
        return batch
    return node.rebuild(batch, [map_tensors(function, child) for child in node.children(batch)])


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The batch's tensors, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    node = node_type(batch)
    tensors: list[torch.Tensor] = []
    if node is not None:
        for child in node.children(batch):
            if isinstance(child, torch.Tensor):
                tensors.append(child)
            else:
                tensors += tensors_in(child)
    return tensors


def sizes_in(batch: Any) -> list[Any]:
    """Of what a batch holds beside tensors: numbers, the lengths of strings, the shapes of arrays; else the lengths of
    what has one. In order.
    """
    if isinstance(batch, (torch.Tensor, type(None))):
        return []
    if isinstance(batch, (bool, int, float)):
        return [batch]
    node = node_type(batch)
    if node is not None:
        return [size for child in node.children(batch) for size in sizes_in(child)]
    if hasattr(batch, "shape"):
        return [tuple(batch.shape)]
    return [len(batch)] if hasattr(type(batch), "__len__") else []


def elements_in(batch: Any) -> int:
    """The elements of all the batch's tensors."""
    if type(batch) is not dict:
        return sum(tensor.numel() for tensor in tensors_in(batch))
    elements = 0  # the usual batch, without calls: runs for every micro-batch
    for value in batch.values():
        elements += value.numel() if isinstance(value, torch.Tensor) else elements_in(value)
    return elements


def bucket_of(samples: int, elements: int) -> int:
    """The bucket of a shape: the elements per sample, rounded up to a power of two."""
    return 1 << (max(1, -(-elements // samples)) - 1).bit_length()


def saved_bucket(key: Any) -> int:
    """A bucket among saved sizes: a power of two, or 0. JSON makes strings of them. Raises ValueError for others."""
    bucket = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
    if type(bucket) is not int or bucket < 0 or bucket & (bucket - 1):
        raise ValueError(f"not a shape: {key!r}")
    return bucket


def node_type(batch: Any) -> NodeType | None:
    """How to open this container; None for what is not one.

    Types are looked up once. Only containers are cached: an unknown type may be registered later.
    """
    kind = type(batch)
    node = _KNOWN.get(kind)
    if node is None and kind not in _LEAVES:
        node = _find_node_type(kind)
        if node is not None:
            _KNOWN[kind] = node
    return node


def _find_node_type(kind: type) -> NodeType | None:
    registered = pytree_functions(kind)
    if registered is not None:
        flatten, unflatten = registered
        return NodeType(lambda node: flatten(node)[0], lambda node, values: unflatten(values, flatten(node)[1]))
    if issubclass(kind, (dict, UserDict)):
        return NodeType(_values, _copy_with_items)
    if dataclasses.is_dataclass(kind):
        return NodeType(_field_values, _dataclass_with_values)
    if issubclass(kind, Mapping):
        return NodeType(_values, _mapping_with_items)
    if issubclass(kind, tuple):
        return NodeType(iter, (lambda _, values: kind._make(values)) if hasattr(kind, "_make") else _sequence_of)
    if issubclass(kind, list):
        return NodeType(iter, _list_with_values)
    return None


def _values(mapping: Mapping) -> list[Any]:
    return [mapping[key] for key in mapping]


def _copy_with_items(mapping: Any, values: list[Any]) -> Any:
    """For dict and UserDict, whose copies have items of their own."""
    new = copy.copy(mapping)
    if getattr(mapping, "__dict__", None) is mapping:  # a dict whose keys are also its attributes
        new.__dict__ = new
    for key, value in zip(list(mapping), values, strict=True):
        new[key] = value
    return new


def _mapping_with_items(mapping: Mapping, values: list[Any]) -> Mapping:
    """For mappings of any other class, mutable or not.

    A plain copy would share the dict that the items are in: that dict is found among the attributes and replaced. A
    class without such an attribute is built from a dict.
    """
    items = dict(zip(mapping, values, strict=True))
    for name, held in getattr(mapping, "__dict__", {}).items():
        if isinstance(held, dict) and held.keys() == items.keys() and all(held[k] is mapping[k] for k in held):
            new = copy.copy(mapping)
            object.__setattr__(new, name, _copy_with_items(held, [items[key] for key in held]))
            return new
    try:
        rebuilt: Any = type(mapping)
        return rebuilt(items)
    except TypeError as error:
        name = type(mapping).__name__
        raise TypeError(
            f"a batch of type {name} cannot be rebuilt with other tensors: give {name} a constructor that takes a "
            "dict, or register it with torch.utils._pytree.register_pytree_node"
        ) from error


def _field_names(instance: Any) -> list[str]:
    """Fields that have a value: one with init=False may have none."""
    return [field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name)]


def _field_values(instance: Any) -> list[Any]:
    return [getattr(instance, name) for name in _field_names(instance)]


def _dataclass_with_values(instance: Any, values: list[Any]) -> Any:
    """Bypasses the constructor, which may not take all fields, and `__setattr__`, which frozen classes forbid."""
    names = _field_names(instance)
    if all(getattr(instance, name) is value for name, value in zip(names, values, strict=True)):
        return instance  # it holds no tensor: leave an unrelated object alone
    new = object.__new__(type(instance))
    if hasattr(instance, "__dict__"):
        new.__dict__.update(instance.__dict__)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(new, name, value)
    return new


def _list_with_values(sequence: list, values: list[Any]) -> list:
    new = copy.copy(sequence)
    new[:] = values
    return new


def _sequence_of(sequence: Any, values: list[Any]) -> Any:
    return type(sequence)(values)


_LEAVES = frozenset({str, bytes, int, float, bool, complex, type(None)})
# By exact type. The containers of most batches are preset, so that they need no look-up.
_KNOWN: dict[type, NodeType] = {
    dict: NodeType(dict.values, lambda node, values: dict(zip(node, values, strict=True))),
    tuple: NodeType(iter, lambda _, values: tuple(values)),
    list: NodeType(iter, lambda _, values: values),
    # A namedtuple whose `batch_sizes` must stay on the CPU.
    PackedSequence: NodeType(
        lambda node: (node.data, node.sorted_indices, node.unsorted_indices),
        lambda node, values: PackedSequence(values[0], node.batch_sizes, *values[1:]),
    ),
}
