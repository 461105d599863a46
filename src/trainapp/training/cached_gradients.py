"""Gradient caching: exact gradients of a loss that compares the samples of its batch, for any micro-batch.

For a task with `embed` and `loss_of_embeddings` a step has three passes:

1. embed every micro-batch without gradients;
2. compute the loss of all embeddings, over all ranks, and its gradients for the embeddings;
3. embed every micro-batch again, with gradients, and backpropagate the cached gradients of its embeddings.

Pass 3 repeats pass 1 exactly: with the same RNG state (the same dropout masks), and after undoing everything pass 1
wrote (BatchNorm counts a batch once). It costs one more forward. Memory holds the inputs and embeddings of this rank's
share of the step, the embeddings of all ranks in pass 2, and the activations of one micro-batch.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", arXiv:2101.06983.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.errors import TrainingStopped, UserError
from trainapp.losses import contrastive
from trainapp.losses.losses import (
    Metrics,
    MetricSum,
    evaluate_metrics,
    has_embeddings,
    refuse_without_gradient,
)
from trainapp.models.inspect import parameters_behind
from trainapp.optim.precision import Number
from trainapp.parallel.ranks import gather_rows
from trainapp.rng import seed_from
from trainapp.state.snapshot import MOVED_ON
from trainapp.training.engine import BatchContext, Engine, Totals
from trainapp.training.phase import Phase


class CachedGradients(Engine):
    """The engine for an embedding loss. `prepare` runs passes 1 and 2; pass 3 computes the gradients."""

    task: Any  # with `embed`, `loss_of_embeddings` and `setting`
    _at_work: tuple[int | None, list[Tensor | None]]  # the micro-batch's first sample and its cached gradients
    _first_pass: Sequence[Tensor] = ()  # in the first step: the embeddings that pass 3 must repeat

    @property
    def _caches(self) -> bool:
        """Whether the current update has an embedding loss."""
        return has_embeddings(self.task)

    def prepare(self, micro_batches: Iterator[MicroBatch], watched: BatchContext) -> Iterator[MicroBatch]:
        """Run passes 1 and 2. Return the same micro-batches for pass 3."""
        micro_batches = super().prepare(micro_batches, watched)
        if not self._caches:
            return micro_batches
        embedded, embeddings = self._embed(micro_batches, watched)
        self.totals, gradients = self._backward_to_embeddings(embedded, embeddings, watched)
        self.loss_weight = self.weight_of(1)  # the cached gradients are already weighted
        self.snapshot.restore_generators()
        self.seed(self.context)
        return self._third_pass(embedded, gradients)

    def _embed(self, micro_batches: Iterator[MicroBatch], watched: BatchContext) -> tuple[deque[MicroBatch], list[Any]]:
        """Run pass 1, and undo its side effects. Return the micro-batches and their embeddings."""
        embedded = deque[MicroBatch]()
        embeddings = []
        for micro in micro_batches:
            with self.at(Phase.FORWARD), watched(micro.data), self.sample_draws(micro):
                embeddings.append(self._without_gradients(micro))
            # Without `slice_samples`, which holds the larger batch that this one is a part of.
            embedded.append(micro._replace(slice_samples=_is_not_split_again))

        # Undo what pass 1 has written, since pass 3 writes it again.
        self.snapshot.restore(except_kinds=MOVED_ON)
        written = [name for name in self.snapshot.lost if not name.partition(".")[0].endswith("data")]  # by `embed`
        if written:
            names = ", ".join(written[:5])
            raise TrainingStopped(
                f"{self.task.setting}: its embed writes parameters in place ({names}), of which there is no copy "
                "yet; with gradient caching it runs twice per step. Make them buffers, which are always copied"
            )
        return embedded, embeddings

    def _without_gradients(self, micro: MicroBatch) -> Any:
        """Return the embeddings, bit-identical to pass 3.

        With torch.compile gradients stay on: a forward without them compiles to different code.
        """

        def embed(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            embeddings = contrastive.embed(self.task, model, batch, micro.samples)
            return tensors_in(embeddings)[0], embeddings

        with torch.set_grad_enabled(self.settings.compile), self.state.precision.autocast:
            _, embeddings = self.strategy.evaluate(embed, micro.data)
        # Copies: a view would keep its whole base alive, such as the features of all tokens.
        copies = [tensor.detach().clone() for tensor in tensors_in(embeddings)]
        return contrastive.like(embeddings, copies)

    def _backward_to_embeddings(
        self, micro_batches: deque[MicroBatch], embeddings: list[Any], watched: BatchContext
    ) -> tuple[Totals, list[Tensor | None]]:
        """Run pass 2, which drops the embeddings.

        Returns:
            The step's totals (on rank 0 only, since all ranks compute the same) and the gradients of this rank's
            embeddings: None for an embedding that needs none.
        """

        task = self.task
        structure = embeddings[-1]
        parts = [tensors_in(embedding) for embedding in embeddings]
        embeddings.clear()
        data = [micro.data for micro in micro_batches]
        with self.at(Phase.FORWARD), watched(data):
            # Join this rank's embeddings; dummy micro-batches have no rows.
            real_parts = [tensors for tensors, micro in zip(parts, micro_batches, strict=True) if micro.real]
            if not real_parts:
                real_parts = [[tensor[:0] for tensor in parts[0]]]
            rows_here = contrastive.join(real_parts, task.setting)
            del parts, real_parts

            # The loss compares the embeddings of all ranks.
            rows, start, end = gather_rows(self.ranks, rows_here, task.setting)
            if self.is_first:
                self._first_pass = [tensor[start:end].detach() for tensor in rows]
            totals, gradients = self._loss_and_gradients(structure, rows)
        return totals, _rows_of(gradients, start, end)

    def _loss_and_gradients(self, structure: Any, rows: Sequence[Tensor]) -> tuple[Totals, list[Tensor | None]]:
        """Return the totals of the loss of all ranks' embeddings, and its gradients for them."""
        task = self.task
        context = self.context
        precision = self.state.precision
        leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in rows]

        # Compute the loss. It is seeded without the rank, so that it draws the same numbers on all ranks.
        seed_from(self.state.device, self.state.seed, context.batch_number, context.update.number)
        with precision.autocast:
            try:
                loss, count, metrics = task.loss_of_embeddings(contrastive.like(structure, leaves))
            except RuntimeError as error:
                contrastive.explain_in_place_write(error, task.setting)
                raise
        if self.is_first:
            _require_of_embeddings(loss, task.setting)

        # Count it once, on rank 0: all ranks have computed the same.
        with self.at(Phase.METRIC):
            metric_sums: dict[str, MetricSum] = {}
            if context.is_logged:
                metric_sums = evaluate_metrics(metrics, self.stateful_metrics)
            del metrics
            totals = Totals().plus(loss, count, metric_sums, real=self.ranks.is_rank_zero)

        # Weight and scale it here: pass 3 does neither.
        with self.at(Phase.BACKWARD):
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            weight = self.weight_of(context.samples).to(loss.dtype)
            scaled_loss = precision.scaler.scale(loss)
            gradients = iter(torch.autograd.grad(scaled_loss, trained, weight, allow_unused=True))
        return totals, [next(gradients) if leaf.requires_grad else None for leaf in leaves]

    def _third_pass(self, micro_batches: deque[MicroBatch], gradients: list[Tensor | None]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, each with the cached gradients of its embeddings in `_at_work`."""
        start = 0
        while micro_batches:
            micro = micro_batches.popleft()
            if micro.real:
                end = start + micro.samples
                self._at_work = (start, _rows_of(gradients, start, end))
                start = end
            else:
                self._at_work = (None, _zeros_for(micro.samples, gradients))
            yield micro

        # Otherwise gradients stay in memory until the next step.
        self._first_pass = ()
        self._at_work = (None, [])

    def compute(self, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """Return a surrogate loss whose gradient for the embeddings is the cached one."""
        if not self._caches:
            return super().compute(batch)
        return self._compute(self._product_with_gradients, batch)

    def _product_with_gradients(self, model: nn.Module, batch: Any) -> tuple[Tensor, float, Metrics]:
        start, gradients = self._at_work
        embeddings = tensors_in(contrastive.embed(self.task, model, batch))

        # In the first step, compare them with those of pass 1.
        if self._first_pass and start is not None:
            end = start + len(embeddings[0])
            first_pass = [tensor[start:end] for tensor in self._first_pass]
            self._require_same(first_pass, embeddings)

        # The gradient of an inner product with a constant is that constant.
        products = []
        for embedding, gradient in zip(embeddings, gradients, strict=True):
            if gradient is not None and embedding.requires_grad:
                products.append(_product(embedding, gradient))
        if not products:
            refuse_without_gradient(self.task.setting)
        return torch.stack(products).sum(), 0, {}

    def add_to_totals(self, micro: MicroBatch, loss: Tensor, count: Number, metrics: Metrics) -> None:
        """Add nothing for a surrogate loss: pass 2 has set the totals of the whole step."""
        if not self._caches:
            super().add_to_totals(micro, loss, count, metrics)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss as it is: the cached gradients are scaled already."""
        if self._caches:
            return loss
        return super().scaled(loss)

    def _require_same(self, first_pass: list[Tensor], third_pass: list[Tensor]) -> None:
        """Raise UserError if pass 3 does not repeat pass 1: the gradients would belong to other embeddings. Reads
        values, which waits for the device: only in the first step of a process.
        """
        tolerance = 1e-3 if self.state.precision.mode == "fp32" else 2e-2
        for first, third in zip(first_pass, third_pass, strict=True):
            a = first.float()
            b = third.detach().float()
            if a.shape != b.shape or float((a - b).norm()) > tolerance * float(a.norm()):
                compile_advice = ", or use train.compile=false" if self.settings.compile else ""
                raise UserError(
                    f"{self.task.setting}: embed() is not deterministic: calling it twice on the same batch gave "
                    "different results, so gradients cannot be cached; draw from the global generators, and keep state "
                    f"in buffers (docs/oom.md), not in plain attributes{compile_advice}"
                )


def _rows_of(gradients: list[Tensor | None], start: int, end: int) -> list[Tensor | None]:
    """Return these rows of each gradient; None for an embedding that needs none."""
    return [None if gradient is None else gradient[start:end] for gradient in gradients]


def _zeros_for(samples: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Return gradients of 0 for a dummy micro-batch."""
    zeros: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is None:
            zeros.append(None)
        else:
            zeros.append(gradient.new_zeros(samples, *gradient.shape[1:]))
    return zeros


def _product(embeddings: Tensor, gradient: Tensor) -> Tensor:
    """Return the inner product, at least in fp32, so that the gradient is passed on unchanged."""
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return (embeddings.to(wide) * gradient.to(wide)).sum()


def _require_of_embeddings(loss: Tensor, setting: str) -> None:
    """Raise UserError for a loss that depends on parameters directly: they would get no gradient from it."""
    direct = list(parameters_behind(loss))
    if direct:
        raise UserError(
            f"{setting}: its loss_of_embeddings depends on a parameter of shape {list(direct[0].shape)}, which "
            "would get no gradient; use parameters only in embed (a trained temperature can multiply one of "
            "the embeddings)"
        )


def _is_not_split_again(start: int, end: int) -> Any:
    raise AssertionError("an embedded micro-batch is not split again")
