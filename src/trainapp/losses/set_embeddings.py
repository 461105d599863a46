"""The embeddings of a whole evaluation set, for a loss that compares samples."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import ranges, tensors_in
from trainapp.losses import contrastive
from trainapp.losses.losses import Metrics
from trainapp.parallel.ranks import Ranks


class SetEmbeddings:
    """The embeddings of all batches of a set.

    The loss is computed for `batch.global_size` of them at a time, in the order of the data, as in training, so it
    depends neither on the evaluation's micro-batch nor on the ranks. They are kept on the host: copying them waits for
    the device once per batch.
    """

    def __init__(self, task: Any):
        self._embedding_task = task
        self._batch: Any = None  # embeddings of the current batch
        self._structure: Any = None  # one batch's embeddings, as the task returned them
        self._by_batch: list[list[Tensor]] = []  # this rank's
        self._whole: list[Tensor] | None = None  # from all ranks; empty except on rank 0, which computes the loss

    def task(self, model: nn.Module, batch: Any) -> tuple[Tensor, float, Metrics]:
        """Embed a batch; the loss is computed later."""
        self._batch = contrastive.embed(self._embedding_task, model, batch)
        first = tensors_in(self._batch)[0]
        return torch.zeros((), device=first.device), 0, {}

    def keep(self, real: bool) -> None:
        """Finish a batch, on all ranks that evaluate together."""
        if real:
            self._structure = self._batch
            self._by_batch.append([tensor.detach().cpu().clone() for tensor in tensors_in(self._batch)])
        self._batch = None

    def gathered(self, ranks: Ranks, interleaved: bool, size: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield all ranks' embeddings, `size` samples at a time, with the index of the first: on rank 0 only.

        Collective on the first call only, so that a retry may run on one rank.

        Args:
            ranks: all ranks of the run.
            interleaved: whether the ranks took the samples in turn, as of a stream.
            size: samples at a time.
        """
        if self._whole is None:
            self._whole = self._gather(ranks, interleaved)
            self._by_batch = []
        return self._chunks(self._whole, size)

    def _gather(self, ranks: Ranks, interleaved: bool) -> list[Tensor]:
        ranks.check_peers()
        setting = self._embedding_task.setting
        rows_here = []
        if self._by_batch:
            rows_here = contrastive.join(self._by_batch, setting)
        rows_of_all_ranks = ranks.all_gather_object(rows_here)

        # Of a stream, ranks may have no samples.
        rows_by_rank = [rows for rows in rows_of_all_ranks if rows]
        if not rows_by_rank or not ranks.is_rank_zero:
            return []
        return _in_order(rows_by_rank, interleaved, setting)

    @staticmethod
    def _chunks(whole: list[Tensor], size: int) -> Iterator[tuple[int, list[Tensor]]]:
        samples = len(whole[0]) if whole else 0
        for start, end in ranges(0, samples, size):
            yield start, [tensor[start:end] for tensor in whole]

    def loss_of(self, rows: list[Tensor], device: torch.device) -> tuple[Tensor, Any, Metrics]:
        """Return the loss of these samples' embeddings, its count and metrics."""
        tensors = [tensor.to(device) for tensor in rows]
        embeddings = contrastive.like(self._structure, tensors)
        result: tuple[Tensor, Any, Metrics] = self._embedding_task.loss_of_embeddings(embeddings)
        return result


def _in_order(rows_by_rank: list[list[Tensor]], interleaved: bool, setting: str) -> list[Tensor]:
    """Return the rows of all ranks in the order of the data."""
    joined = contrastive.join(rows_by_rank, setting)
    if not interleaved or len(rows_by_rank) == 1:
        return joined

    # Rank r has the samples r, r + ranks, r + 2 ranks, ...
    positions = []
    for rank, rows in enumerate(rows_by_rank):
        numbers_on_rank = torch.arange(len(rows[0]))
        positions.append(numbers_on_rank * len(rows_by_rank) + rank)
    order = torch.cat(positions).argsort()
    return [tensor[order] for tensor in joined]
