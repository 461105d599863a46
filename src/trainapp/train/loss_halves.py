"""A batch and its halves with the same values, for a comparison of what a loss makes of them: see `loss_check`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.data.loader import Fetcher, Request
from trainapp.train.components import Components
from trainapp.train.task_attributes import attribute


class CutBatch(NamedTuple):
    """A batch and its halves. same: whether these are known to hold the same values as the batch."""

    batch: Any
    halves: list[Any]
    same: bool


def halves_of(components: Components, seed: int, samples: int, device: torch.device) -> CutBatch:
    """The first samples and their halves. Raises what the data set raises.

    Halves collated on their own may be padded differently, or mix other samples; then `split` may cut them, or the
    first half twice is the batch, which is as long as its halves.
    """
    data, half = components.train_data, samples // 2
    split = next(filter(callable, (getattr(data, "split", None), attribute(components.task, "split"))), None)
    first, second = list(range(half)), list(range(half, samples))
    requests = [Request(0, indices) for indices in (first + second, first, second, first + first)]
    whole, a, b, twice = map(Fetcher(data, seed).__getitem__, requests)
    cuts = [(whole, [a, b]), (twice, [a, a])]
    if split is not None:
        on_device = map_tensors(lambda tensor: tensor.to(device), whole)
        cuts.insert(1, (on_device, [split(on_device, 0, half), split(on_device, half, samples)]))
    for batch, halves in cuts:
        if consists_of(batch, halves):
            return CutBatch(batch, halves, same=True)
    return CutBatch(whole, [a, b], same=False)


def consists_of(batch: Any, parts: Sequence[Any]) -> bool:
    """Whether each tensor of the batch is its parts' next to each other in some dimension; but for tables, which all of
    them have alike.
    """
    of_each = [tensors_in(batch), *map(tensors_in, parts)]
    if len({len(tensors) for tensors in of_each}) > 1:
        return False
    of_samples = [tensors for tensors in zip(*of_each, strict=True) if not _are_alike(tensors)]
    return bool(of_samples) and all(_is_made_of(whole, pieces) for whole, *pieces in of_samples)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    return all(_is_plain(t) for t in tensors) and all(torch.equal(tensors[0], t) for t in tensors[1:])


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_made_of(whole: Tensor, pieces: list[Tensor]) -> bool:
    if not all(_is_plain(t) and t.ndim == whole.ndim for t in (whole, *pieces)):
        return False
    for dimension in range(whole.ndim):
        sizes = [(*p.shape[:dimension], *p.shape[dimension + 1 :]) for p in (whole, *pieces)]
        if len(set(sizes)) == 1 and torch.equal(whole, torch.cat(pieces, dimension)):
            return True
    return False
