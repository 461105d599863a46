"""Finds samples that are collated differently together than in halves, mostly because they are padded to the longest.

The comparison of the same values (`assembly.trials`) does not see what depends on the padding. A batch of samples of
different lengths is therefore compared with its halves as training makes them: collated apart, or cut by `split`.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.assembly.trials import Cut, Samples, are_joined, batch_dims, equal_tensors
from trainapp.data.batch import elements_in, map_tensors, tensors_in
from trainapp.data.loader import Fetcher, Request, Split
from trainapp.errors import summary_of

LOOKED_AT = 16  # samples among which to look for other lengths
ENOUGH = 2.0  # times as many elements in one half as in the other: no sum of real lengths is then equal by chance


def with_cut(samples: Samples, data: Any, indices: Sequence[Any], seed: int, split: Split | None) -> Samples:
    """The samples with a batch that is not just its halves joined, if there is one; otherwise the reason.

    indices: of the first samples, `LOOKED_AT` of them if there are as many. split: see `BatchLoader`.
    """
    fetcher = Fetcher(data, seed)
    if fetcher.only_stacks:
        return samples
    try:
        return _with_cut(samples, fetcher, list(indices), split)
    except Exception as error:  # training meets it, too, and tells where
        return samples._replace(cut=Cut(reason=summary_of(error)))


def _with_cut(samples: Samples, fetcher: Fetcher, indices: list[Any], split: Split | None) -> Samples:
    half = samples.number // 2
    batches = dict(samples.batches)
    if not samples.same:
        names, chosen = ("ab", "a", "b"), indices[: samples.number]
    else:
        others = _padded_otherwise(samples, fetcher, indices)
        if not others:
            reason = f"the first {len(indices)} samples have one shape" if fetcher.collate is not None else ""
            return samples._replace(cut=Cut(reason=reason))
        names, chosen = ("ac", "a", "c"), indices[:half] + others
        batches["ac"], batches["c"] = (fetcher[Request(0, of)] for of in (chosen, others))
    whole = batches[names[0]]
    if reason := _reason_not_to_compare(fetcher, whole, chosen):
        return samples._replace(cut=Cut(reason=reason))
    if split is not None:
        batches["A"], batches["C"] = _halves_by(split, whole, half)
        if not batch_dims(whole, [batches["A"], batches["C"]]):
            names = (names[0], "A", "C")
    halves = [batches[name] for name in names[1:]]
    if batch_dims(whole, halves):
        return samples._replace(cut=Cut(reason="batches are their halves joined, whatever their shapes"))
    return samples._replace(batches=batches, cut=Cut(names, is_padded=is_padded(whole, halves)))


def _padded_otherwise(samples: Samples, fetcher: Fetcher, indices: list[Any]) -> list[Any]:
    """Half as many samples as are compared, whose batch has shapes other than that of the first half; the first of
    enough difference, or the most different. Empty if there are none.
    """
    half, first = samples.number // 2, samples.batches["a"]
    # The whole batch is not its halves joined: they differ, if not by their shapes.
    is_sure = "ba" not in samples.batches
    best, largest = (indices[half : 2 * half], 0.0) if is_sure else ([], 0.0)
    for start in range(half, len(indices) - half + 1, half):
        others = indices[start : start + half]
        difference = _difference(first, fetcher[Request(0, others)])
        if difference > largest:
            best, largest = others, difference
        if difference >= ENOUGH:
            break
    return best


def _difference(first: Any, second: Any) -> float:
    """How many times as many elements one batch has as the other; 0 if all shapes are equal."""
    shapes, others = ([tuple(tensor.shape) for tensor in tensors_in(batch)] for batch in (first, second))
    if shapes == others:
        return 0.0
    fewer, more = sorted((elements_in(first), elements_in(second)))
    return more / max(fewer, 1)


def _reason_not_to_compare(fetcher: Fetcher, batch: Any, indices: list[Any]) -> str:
    """Why the batch of these samples may differ from its halves by chance; "" if it does not."""
    collate = fetcher.collate
    draws: list[bool] = []
    if collate is not None:
        fetcher.collate = _noting_draws(collate, draws)
    again = fetcher[Request(0, indices)]
    fetcher.collate = collate
    if any(draws):
        return "the data's `collate` draws random numbers"
    tensors, repeated = tensors_in(batch), tensors_in(again)
    if len(tensors) != len(repeated) or not all(map(equal_tensors, tensors, repeated)):
        return "a batch has other values when it is fetched again"
    return ""


def _noting_draws(collate: Callable[[list[Any]], Any], draws: list[bool]) -> Callable[[list[Any]], Any]:
    """The function, which then appends to `draws` whether it has drawn from a global generator."""

    def noting(samples: list[Any]) -> Any:
        before = _generator_states()
        batch = collate(samples)
        draws.append(before != _generator_states())
        return batch

    return noting


def _generator_states() -> bytes:
    states = (torch.get_rng_state().numpy(), np.random.get_state(), random.getstate())
    return pickle.dumps(states)


def _halves_by(split: Callable[[Any, int, int], Any], batch: Any, half: int) -> list[Any]:
    """The batch cut in two. Each call has its own copy."""
    return [split(map_tensors(Tensor.clone, batch), *bounds) for bounds in ((0, half), (half, 2 * half))]


def is_padded(batch: Any, parts: Sequence[Any]) -> bool:
    """Whether each tensor of a batch holds its parts' values, at the start or at the end, and padding beyond them."""
    of_each = [tensors_in(batch), *map(tensors_in, parts)]
    if len({len(tensors) for tensors in of_each}) > 1:
        return False
    return all(_holds(whole, pieces) for whole, *pieces in zip(*of_each, strict=True))


def _holds(whole: Tensor, pieces: list[Tensor]) -> bool:
    """Whether a tensor is its pieces, joined in one dimension and padded in others, or equal to each of them."""
    if all(equal_tensors(whole, piece) for piece in pieces):
        return True
    if whole.is_nested or whole.layout is not torch.strided:
        return any(are_joined(whole, pieces, dim) for dim in range(whole.dim()))
    return any(_is_padded_along(whole, pieces, dim) for dim in range(whole.dim()))


def _is_padded_along(whole: Tensor, pieces: list[Tensor], dim: int) -> bool:
    if any(piece.dim() != whole.dim() for piece in pieces):
        return False
    sizes = [piece.shape[dim] for piece in pieces]
    if sum(sizes) != whole.shape[dim]:
        return False
    rows = whole.split(sizes, dim)
    at_start = all(_begins_with(row, piece) for row, piece in zip(rows, pieces, strict=True))
    return at_start or all(_ends_with(row, piece) for row, piece in zip(rows, pieces, strict=True))


def _begins_with(tensor: Tensor, part: Tensor) -> bool:
    return torch.equal(tensor[tuple(slice(size) for size in part.shape)], part)


def _ends_with(tensor: Tensor, part: Tensor) -> bool:
    corner = zip(tensor.shape, part.shape, strict=True)
    return torch.equal(tensor[tuple(slice(max(0, size - length), None) for size, length in corner)], part)
