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
        joined_dims = (dim for dim in range(tensor.dim()) if _is_concatenation(tensor, pieces, dim))
        dim = next(joined_dims, None)
        if dim is None:
            return []
        dims.append(dim)
    return dims if any(dim is not None for dim in dims) else []


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
    tensors_of_parts = [tensors_in(part) for part in parts]
    new_tensors = []
    for tensor, dim, *pieces in zip(tensors_in(batch), dims, *tensors_of_parts, strict=True):
        new_tensors.append(tensor if dim is None else _concatenate(pieces, dim))
    in_order = iter(new_tensors)
    return map_tensors(lambda _: next(in_order), batch)


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of a batch are equal, also sparse and nested ones, for which torch has no `equal`."""
    if (first.layout, first.dtype) != (second.layout, second.dtype):
        return False
    if (first.is_nested, first.dim()) != (second.is_nested, second.dim()):
        return False
    if first.is_nested:
        first_rows = first.unbind()
        second_rows = second.unbind()
        return len(first_rows) == len(second_rows) and all(map(torch.equal, first_rows, second_rows))
    if first.layout is torch.sparse_coo:
        first = first.coalesce()
        second = second.coalesce()
    return first.shape == second.shape and all(map(torch.equal, strided_parts(first), strided_parts(second)))


def _tensors_and_pieces(batch: Any, parts: Sequence[Any]) -> list[tuple[Tensor, list[Tensor]]] | None:
    """Return each tensor of the batch with those of the parts in its place; None if their numbers differ."""
    tensors = tensors_in(batch)
    tensors_of_parts = [tensors_in(part) for part in parts]
    if any(len(part_tensors) != len(tensors) for part_tensors in tensors_of_parts):
        return None
    return [(tensor, pieces) for tensor, *pieces in zip(tensors, *tensors_of_parts, strict=True)]


def _is_concatenation(tensor: Tensor, pieces: list[Tensor], dim: int) -> bool:
    with contextlib.suppress(RuntimeError):  # shapes that cannot be joined
        return are_equal(tensor, _concatenate(pieces, dim))
    return False


def _concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenate, as `torch.cat`, also what it does not take: compressed sparse tensors, and nested ones by rows."""
    layout = tensors[0].layout
    if tensors[0].is_nested:
        rows: list[Tensor] = []
        for tensor in tensors:
            rows.extend(tensor.unbind())
        if dim:
            raise RuntimeError("nested tensors are joined in their first dimension")
        return torch.nested.as_nested_tensor(rows, layout=layout)
    if layout in (torch.sparse_csr, torch.sparse_csc):
        return torch.cat([tensor.to_sparse_coo() for tensor in tensors], dim).to_sparse(layout=layout)
    return torch.cat(tensors, dim)


def _is_padded_tensor(tensor: Tensor, pieces: list[Tensor]) -> bool:
    """Return whether a tensor is its pieces, joined in one dimension and padded in others, or equal to each of them."""
    if all(are_equal(tensor, piece) for piece in pieces):
        return True
    # Sparse and nested tensors are not cut into rows: they have no padding.
    can_be_padded = tensor.layout is torch.strided and not tensor.is_nested
    is_joined_along = _is_padded_along if can_be_padded else _is_concatenation
    return any(is_joined_along(tensor, pieces, dim) for dim in range(tensor.dim()))


def _is_padded_along(tensor: Tensor, pieces: list[Tensor], dim: int) -> bool:
    if any(piece.dim() != tensor.dim() for piece in pieces):
        return False
    sizes = [piece.shape[dim] for piece in pieces]
    if sum(sizes) != tensor.shape[dim]:
        return False
    blocks = tensor.split(sizes, dim)
    if all(_begins_with(block, piece) for block, piece in zip(blocks, pieces, strict=True)):
        return True
    return all(_ends_with(block, piece) for block, piece in zip(blocks, pieces, strict=True))


def _begins_with(tensor: Tensor, piece: Tensor) -> bool:
    corner = tuple(slice(size) for size in piece.shape)
    return torch.equal(tensor[corner], piece)


def _ends_with(tensor: Tensor, piece: Tensor) -> bool:
    sizes = zip(tensor.shape, piece.shape, strict=True)
    corner = tuple(slice(max(0, size - piece_size), None) for size, piece_size in sizes)
    return torch.equal(tensor[corner], piece)
