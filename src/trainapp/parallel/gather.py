"""Rows of all ranks on every rank, such as the embeddings that a contrastive loss compares."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.parallel.ranks import Ranks


class Gathered(NamedTuple):
    """The rows of all ranks, in the order of the ranks; this rank's are [start, end)."""

    tensors: list[Tensor]
    start: int
    end: int


def gather_rows(ranks: Ranks, tensors: list[Tensor], setting: str) -> Gathered:
    """Tensors of shape [n, ...], where n may differ between ranks, as [sum of n, ...]. Collective; no gradients.

    Each is summed with zeros for the rows of the others: exact, and the only collective that all backends and a trace
    have alike. Raises UserError where the ranks have tensors of other shapes or types; PeerOutOfMemory as
    `check_peers` does. setting: names the tensors in messages.
    """
    own = len(tensors[0])
    if ranks.world == 1:
        return Gathered(tensors, 0, own)
    ranks.check_peers()
    by_rank = ranks.all_gather_object((own, [(tuple(t.shape[1:]), str(t.dtype)) for t in tensors]))
    if any(forms != by_rank[0][1] for _, forms in by_rank):
        raise UserError(f"{setting}: the embeddings of different ranks have different shapes; give all the same")
    start = sum(rows for rows, _ in by_rank[: ranks.rank])
    total = sum(rows for rows, _ in by_rank)
    return Gathered([_spread(ranks, tensor, start, total) for tensor in tensors], start, start + own)


def _spread(ranks: Ranks, tensor: Tensor, start: int, total: int) -> Tensor:
    # gloo sums no booleans, and not every half precision: both fit into a wider type without a change.
    wide = tensor.dtype
    if tensor.dtype is torch.bool:
        wide = torch.uint8
    elif tensor.is_floating_point() and tensor.itemsize < 4:
        wide = torch.float32
    whole = torch.zeros((total, *tensor.shape[1:]), dtype=wide, device=tensor.device)
    whole[start : start + len(tensor)] = tensor
    return ranks.all_reduce_sum(whole).to(tensor.dtype)
