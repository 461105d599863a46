"""Collects evaluation batches: adds up sums, or gathers embeddings for one loss over all of them."""

from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import ranges, tensors_in
from trainapp.losses import embeddings
from trainapp.losses.losses import Metrics, Task, evaluate_metrics, has_embeddings
from trainapp.rng import seed_from
from trainapp.training.micro_batches import watch_micro_batch
from trainapp.training.session import Session
from trainapp.training.totals import Totals


class SumsOfBatches:
    """The task itself: each batch adds to the totals."""

    def __init__(self, task: Task):
        self.task = task

    def keep(self, real: bool) -> None:
        """A batch is finished."""

    def totals(self, session: Session, totals: Totals, interleaved: bool) -> Totals:
        """Of the whole set, this rank's part. totals: of its batches."""
        return totals


class LossOfEmbeddings(SumsOfBatches):
    """Collects the embeddings of all batches; the loss is of `batch.global_size` of them at a time, in the order of the
    data, as in training. So it depends neither on the evaluation's micro-batch nor on the ranks.

    They are kept on the host: copying them waits for the device once per batch.
    """

    def __init__(self, task: Any):
        self._own = task
        self._embedded: Any = None  # of the batch at work
        self._structure: Any = None
        self._kept: list[list[Tensor]] = []
        self._whole: list[Tensor] | None = None  # of all ranks
        self._owner = 0  # the rank that computes the loss

    def task(self, model: nn.Module, batch: Any) -> tuple[Tensor, float, Metrics]:
        """Embeds a batch; there is no loss yet."""
        self._embedded = embeddings.embed(self._own, model, batch)
        first = tensors_in(self._embedded)[0]
        return torch.zeros((), device=first.device), 0, {}

    def keep(self, real: bool) -> None:
        """The batch is finished on all ranks that evaluate together."""
        if real:
            self._structure = self._embedded
            self._kept.append([tensor.detach().cpu().clone() for tensor in tensors_in(self._embedded)])
        self._embedded = None

    def totals(self, session: Session, totals: Totals, interleaved: bool) -> Totals:
        """Of all ranks' embeddings, on the first rank that has some; the others have none. Collective, but not again
        where memory runs out after that.
        """
        if self._whole is None:
            session.ranks.check_peers()
            parts = session.ranks.all_gather_object(
                embeddings.join(self._kept, self._own.setting) if self._kept else []
            )
            owners = [rank for rank, part in enumerate(parts) if part]
            if not owners:  # a stream without samples
                return totals
            self._owner = owners[0]
            self._whole, self._kept = _in_order([part for part in parts if part], interleaved, self._own.setting), []
        if session.ranks.rank != self._owner:
            return Totals()
        session.metrics.reset()  # of an attempt that ran out of memory
        of_all = Totals(samples=totals.samples)
        for start, end in ranges(0, len(self._whole[0]), session.config.batch.global_size):
            chosen = [tensor[start:end].to(session.state.device) for tensor in self._whole]
            with watch_micro_batch(session, session.sizes.evaluation, chosen), session.state.precision.autocast:
                seed_from(session.state.device, session.state.seed, start)  # the same on all ranks
                loss, count, metrics = self._own.loss_of_embeddings(embeddings.like(self._structure, chosen))
                finished = evaluate_metrics(metrics, session.metrics.names)
                session.metrics.update(metrics)
            of_all = of_all.plus(loss.clone(), count, finished)
        return of_all


def _in_order(parts: list[list[Tensor]], interleaved: bool, setting: str) -> list[Tensor]:
    """The rows of all ranks in the order of the data."""
    joined = embeddings.join(parts, setting)
    if not interleaved or len(parts) == 1:
        return joined
    numbers = [torch.arange(len(part[0])) * len(parts) + rank for rank, part in enumerate(parts)]
    order = torch.cat(numbers).argsort()
    return [tensor[order] for tensor in joined]


def collector_for(task: Task) -> SumsOfBatches:
    """What collects the task's batches, in one evaluation."""
    return LossOfEmbeddings(task) if has_embeddings(task) else SumsOfBatches(task)
