"""Batches that are made of others: whether a batch is its parts joined, perhaps with padding, and joining parts."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.torch_private import strided_parts


def batch_dims(batch: Any, parts: Sequence[Any]) -> list[int | None]:
    """Return, for each tensor of the batch, the dimension in which it is the concatenation of its parts, None for one
    that is identical in all of them. Empty if some tensor is neither, or if all are identical.
    """
    tensors_and_pieces = _tensors_and_pieces(batch, parts)
    if tensors_and_pieces is None:
        return []
    dims: list[int | None] = []
    for tensor, pieces in tensors_and_pieces:
        if all(are_equal(tensor, piece) for piece in pieces):
            dims.append(None)
            continue
        dim = _joined_dim(tensor, pieces)
        if dim is None:
            return []
        dims.append(dim)

    # If all tensors are shared, nothing says how many samples a part has.
    all_are_identical = all(dim is None for dim in dims)
    return [] if all_are_identical else dims


def is_padded(batch: Any, parts: Sequence[Any]) -> bool:
    """Return whether each tensor of a batch holds its parts' values, at the start or at the end, and padding beyond."""
    tensors_and_pieces = _tensors_and_pieces(batch, parts)
    if tensors_and_pieces is None:
        return False
    return all(_is_padded_tensor(tensor, pieces) for tensor, pieces in tensors_and_pieces)


def join_parts(batch: Any, parts: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Return a batch like this one, made of other parts.

    Args:
        batch: gives the containers, and the tensors that all parts share.
        parts: what to join, in this order.
        dims: the batch's, see `batch_dims`.
    """
    tensors = tensors_in(batch)
    tensors_of_parts = [tensors_in(part) for part in parts]
    new_tensors = []
    for tensor, dim, *pieces in zip(tensors, dims, *tensors_of_parts, strict=True):
        if dim is None:
            new_tensors.append(tensor)
        else:
            new_tensors.append(_concatenate(pieces, dim))

    # `map_tensors` visits the tensors in the order in which `tensors_in` lists them.
    in_order = iter(new_tensors)
    return map_tensors(lambda _: next(in_order), batch)


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


def _tensors_and_pieces(batch: Any, parts: Sequence[Any]) -> list[tuple[Tensor, list[Tensor]]] | None:
    """Return each tensor of the batch with those of the parts in its place; None if their numbers differ."""
    tensors = tensors_in(batch)
    tensors_of_parts = [tensors_in(part) for part in parts]
    for part_tensors in tensors_of_parts:
        if len(part_tensors) != len(tensors):
            return None

    tensors_and_pieces = []
    for tensor, *pieces in zip(tensors, *tensors_of_parts, strict=True):
        tensors_and_pieces.append((tensor, pieces))
    return tensors_and_pieces


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
