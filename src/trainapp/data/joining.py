"""Batches that are made of others: whether a batch is its parts joined, perhaps with padding, and joining parts."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainapp.data.batch import flatten_container, tensors_in
from trainapp.torch_private import strided_parts


class Leaf(NamedTuple):
    """A tensor of a batch, or a list with an element per sample, such as the boxes of each image; and what the parts of
    the batch have in its place.
    """

    value: Any
    pieces: list[Any]

    @property
    def is_list(self) -> bool:
        """Whether it is a list of samples."""
        return not isinstance(self.value, Tensor)


def batch_dims(batch: Any, parts: Sequence[Any]) -> list[int | None]:
    """Return, for each leaf of the batch, the dimension in which it is the concatenation of its parts, 0 for a list of
    samples, None for a tensor that is identical in all of them. Empty if some leaf is neither, or if all are identical.
    """
    leaves = _leaves(batch, parts)
    if leaves is None:
        return []
    dims: list[int | None] = []
    for leaf in leaves:
        if leaf.is_list:
            if not all(map(_are_equal_samples, leaf.value, itertools.chain(*leaf.pieces))):
                return []
            dims.append(0)
            continue
        if all(are_equal(leaf.value, piece) for piece in leaf.pieces):
            dims.append(None)
            continue
        dim = _joined_dim(leaf.value, leaf.pieces)
        if dim is None:
            return []
        dims.append(dim)

    # If all tensors are shared, nothing says how many samples a part has.
    all_are_identical = all(dim is None for dim in dims)
    return [] if all_are_identical else dims


def is_padded(batch: Any, parts: Sequence[Any]) -> bool:
    """Return whether each tensor of a batch holds its parts' values, at the start or at the end, and padding beyond."""
    leaves = _leaves(batch, parts)
    if leaves is None:
        return False
    for leaf in leaves:
        if leaf.is_list:
            if not all(is_padded(*pair) for pair in _samples_and_pieces(leaf)):
                return False
        elif not _is_padded_tensor(leaf.value, leaf.pieces):
            return False
    return True


def join_parts(batch: Any, parts: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Return a batch like this one, made of other parts.

    Args:
        batch: gives the containers, and the tensors that all parts share.
        parts: what to join, in this order.
        dims: the batch's, see `batch_dims`.
    """
    remaining_dims = iter(dims)

    def join(value: Any, pieces: Sequence[Any]) -> Any:
        if isinstance(value, Tensor):
            dim = next(remaining_dims)
            return value if dim is None else _concatenate(list(pieces), dim)
        if _is_list_of_samples(value, pieces):
            next(remaining_dims)
            return type(value)(itertools.chain(*pieces))
        flattened = flatten_container(value)
        if flattened is None:
            return value
        children, rebuild = flattened
        children_of_pieces = [_children(piece) for piece in pieces]
        if any(len(piece_children) != len(children) for piece_children in children_of_pieces):
            return value
        pieces_by_child = zip(*children_of_pieces, strict=True)
        return rebuild([join(*pair) for pair in zip(children, pieces_by_child, strict=True)])

    return join(batch, parts)


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of a batch are equal, also sparse and nested ones, for which torch has no `equal`."""
    if (first.layout, first.dtype) != (second.layout, second.dtype):
        return False
    if (first.is_nested, first.dim()) != (second.is_nested, second.dim()):
        return False

    # Nested tensors: row by row.
    if first.is_nested:
        first_rows = first.unbind()
        second_rows = second.unbind()
        return len(first_rows) == len(second_rows) and all(map(torch.equal, first_rows, second_rows))

    # Sparse tensors: by their indices and values, which must be in a unique order.
    if first.layout is torch.sparse_coo:
        first = first.coalesce()
        second = second.coalesce()
    return first.shape == second.shape and all(map(torch.equal, strided_parts(first), strided_parts(second)))


def _leaves(batch: Any, parts: Sequence[Any]) -> list[Leaf] | None:
    """Return the leaves of the batch, in order, with what the parts have there; None if their numbers differ."""
    if isinstance(batch, Tensor):
        return [Leaf(batch, list(parts))] if all(isinstance(part, Tensor) for part in parts) else None
    if _is_list_of_samples(batch, parts):
        return [Leaf(batch, list(parts))]
    children = _children(batch)
    children_of_parts = [_children(part) for part in parts]
    if any(len(part_children) != len(children) for part_children in children_of_parts):
        return None if tensors_in([batch, *parts]) else []  # a list of plain values is no leaf

    leaves = []
    for child, *pieces in zip(children, *children_of_parts, strict=True):
        leaves_below = _leaves(child, pieces)
        if leaves_below is None:
            return None
        leaves.extend(leaves_below)
    return leaves


def _children(batch: Any) -> Sequence[Any]:
    """Return the children of a container that has tensors; nothing else has any."""
    flattened = flatten_container(batch)
    if flattened is None or isinstance(batch, Tensor):
        return []
    return flattened[0]


def _is_list_of_samples(batch: Any, parts: Sequence[Any]) -> bool:
    """Return whether a list or tuple has as many elements as those of the parts together, and more than any of them."""
    values = (batch, *parts)
    if any(type(value) not in (list, tuple) for value in values):
        return False
    lengths = [len(part) for part in parts]
    return len(batch) == sum(lengths) > max(lengths)


def _samples_and_pieces(leaf: Leaf) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each element of a list of samples, with the one in the lists of the parts."""
    for sample, piece in zip(leaf.value, itertools.chain(*leaf.pieces), strict=True):
        yield sample, [piece]


def _are_equal_samples(first: Any, second: Any) -> bool:
    """Return whether two elements of lists of samples are equal: tensors, containers of them, or plain values. Those of
    unknown types count as equal.
    """
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and are_equal(first, second)
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and np.array_equal(first, second)
    if isinstance(first, (str, bytes, int, float)):
        return bool(first == second)
    children = _children(first)
    other_children = _children(second)
    return len(children) == len(other_children) and all(map(_are_equal_samples, children, other_children))


def _joined_dim(tensor: Tensor, pieces: list[Tensor]) -> int | None:
    """Return the first dimension in which the tensor is the concatenation of its pieces; None if there is none."""
    for dim in range(tensor.dim()):
        if _is_concatenation(tensor, pieces, dim):
            return dim
    return None


def _is_concatenation(tensor: Tensor, pieces: list[Tensor], dim: int) -> bool:
    with contextlib.suppress(RuntimeError):  # shapes that cannot be joined
        return are_equal(tensor, _concatenate(pieces, dim))
    return False


def _concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate, as `torch.cat`, also what it does not take: compressed sparse tensors, and nested ones by rows."""
    layout = tensors[0].layout
    if tensors[0].is_nested:
        if dim:
            raise RuntimeError("nested tensors are joined in their first dimension")
        rows: list[Tensor] = []
        for tensor in tensors:
            rows.extend(tensor.unbind())
        return torch.nested.as_nested_tensor(rows, layout=layout)

    if layout in (torch.sparse_csr, torch.sparse_csc):
        by_coordinates = [tensor.to_sparse_coo() for tensor in tensors]
        return torch.cat(by_coordinates, dim).to_sparse(layout=layout)
    return torch.cat(tensors, dim)


def _is_padded_tensor(tensor: Tensor, pieces: list[Tensor]) -> bool:
    """Return whether a tensor is its pieces, joined in one dimension and padded in others, or equal to each of them."""
    if all(are_equal(tensor, piece) for piece in pieces):
        return True
    # Sparse and nested tensors are not cut into rows: they have no padding.
    can_be_padded = tensor.layout is torch.strided and not tensor.is_nested
    if not can_be_padded:
        return _joined_dim(tensor, pieces) is not None
    return any(_is_padded_along(tensor, pieces, dim) for dim in range(tensor.dim()))


def _is_padded_along(tensor: Tensor, pieces: list[Tensor], dim: int) -> bool:
    """Return whether a tensor is its pieces joined in this dimension, with padding in others: all at the end, or all at
    the start.
    """
    if any(piece.dim() != tensor.dim() for piece in pieces):
        return False
    sizes = [piece.shape[dim] for piece in pieces]
    if sum(sizes) != tensor.shape[dim]:
        return False
    blocks = tensor.split(sizes, dim)
    if all(map(_begins_with, blocks, pieces)):
        return True
    return all(map(_ends_with, blocks, pieces))


def _begins_with(tensor: Tensor, piece: Tensor) -> bool:
    corner = tuple(slice(size) for size in piece.shape)
    return torch.equal(tensor[corner], piece)


def _ends_with(tensor: Tensor, piece: Tensor) -> bool:
    corner = []
    for size, piece_size in zip(tensor.shape, piece.shape, strict=True):
        first = max(0, size - piece_size)
        corner.append(slice(first, None))
    return torch.equal(tensor[tuple(corner)], piece)
