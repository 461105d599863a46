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
from trainapp.losses.losses import Metrics, evaluate_metrics, has_embeddings, refuse_without_gradient
from trainapp.models.inspect import parameters_behind
from trainapp.optim.precision import Number
from trainapp.parallel.ranks import gather_rows
from trainapp.rng import seed_from
from trainapp.snapshot import MOVED_ON
from trainapp.training.engine import Around, Engine, Totals
from trainapp.training.phase import Phase


class CachedGradients(Engine):
    """The engine for an embedding loss. `micro_batches` runs passes 1 and 2; pass 3 computes the gradients."""

    task: Any  # with `embed`, `loss_of_embeddings` and `setting`
    _at_work: tuple[int | None, list[Tensor | None]]  # the micro-batch's first sample and its cached gradients
    _first_pass: Sequence[Tensor] = ()  # in the first step: the embeddings that pass 3 must repeat

    @property
    def _caches(self) -> bool:
        """Whether the current update has an embedding loss."""
        return has_embeddings(self.task)

    def micro_batches(self, cut: Iterator[MicroBatch], watched: Around) -> Iterator[MicroBatch]:
        """Run passes 1 and 2; return the same micro-batches for pass 3."""
        if not self._caches:
            return cut
        micro_batches, embeddings = self._embed(cut, watched)
        self._step_totals, gradients = self._backward_to_embeddings(micro_batches, embeddings, watched)
        self.loss_weight = self.weight_of(1)  # the cached gradients are already weighted
        self.snapshot.restore_generators()
        self.seed(self.step)
        return self._third_pass(micro_batches, gradients)

    def _embed(self, cut: Iterator[MicroBatch], watched: Around) -> tuple[deque[MicroBatch], list[Any]]:
        """Pass 1: the micro-batches and their embeddings. Its side effects are undone."""
        micro_batches, embeddings = deque[MicroBatch](), []
        for micro in cut:
            self.phase = Phase.FORWARD
            with watched(micro.data), self.drawing(micro):
                embeddings.append(self._without_gradients(micro))
            # Without `piece`, which holds the larger batch that this one was cut from.
            micro_batches.append(micro._replace(piece=_no_piece))
            self.phase = Phase.DATA
        self.snapshot.restore(but=MOVED_ON)
        if self.snapshot.lost:
            names = ", ".join(self.snapshot.lost[:5])
            raise TrainingStopped(
                f"{self.task.setting}: its embed writes parameters in place ({names}), of which there is no copy "
                "yet; with gradient caching it runs twice per step. Make them buffers, which are always copied"
            )
        return micro_batches, embeddings

    def _without_gradients(self, micro: MicroBatch) -> Any:
        """The embeddings, bit-identical to pass 3: with torch.compile, a no-grad forward compiles to different code."""

        def call(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            found = contrastive.embed(self.task, model, batch, micro.samples)
            return tensors_in(found)[0], found

        with torch.set_grad_enabled(self.settings.compile), self.state.precision.autocast:
            _, found = self.strategy.evaluate(call, micro.data)
        # Copies: a view would keep its whole base alive, such as the features of all tokens.
        return contrastive.like(found, [tensor.detach().clone() for tensor in tensors_in(found)])

    def _backward_to_embeddings(
        self, micro_batches: deque[MicroBatch], embeddings: list[Any], watched: Around
    ) -> tuple[Totals, list[Tensor | None]]:
        """Pass 2, which drops the embeddings. Returns the step's totals (on rank 0 only, since all ranks compute the
        same) and the gradients of this rank's embeddings: None for an embedding that needs none.
        """
        task, precision, step = self.task, self.state.precision, self.step
        structure, parts = embeddings[-1], list(map(tensors_in, embeddings))
        embeddings.clear()
        self.phase = Phase.FORWARD
        with watched([micro.data for micro in micro_batches]):
            real = [own for own, micro in zip(parts, micro_batches, strict=True) if micro.real]
            joined = contrastive.join(real or [[tensor[:0] for tensor in parts[0]]], task.setting)
            del parts, real
            whole, start, end = gather_rows(self.ranks, joined, task.setting)
            if self.is_first:
                self._first_pass = [tensor[start:end].detach() for tensor in whole]
            leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in whole]
            seed_from(self.state.device, self.state.seed, step.attempt, step.update.number)  # the same on all ranks
            with precision.autocast:
                loss, count, metrics = task.loss_of_embeddings(contrastive.like(structure, leaves))
            if self.is_first:
                _require_of_embeddings(loss, task.setting)
            self.phase = Phase.METRIC
            finished = evaluate_metrics(metrics, self.stateful_metrics) if step.is_logged else {}
            del metrics
            totals = Totals().plus(loss, count, finished, real=self.ranks.is_rank_zero)
            self.phase = Phase.BACKWARD
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            weight = self.weight_of(step.samples).to(loss.dtype)
            found = iter(torch.autograd.grad(precision.scaler.scale(loss), trained, weight, allow_unused=True))
            own = [next(found) if leaf.requires_grad else None for leaf in leaves]
        self.phase = Phase.DATA
        return totals, [None if gradient is None else gradient[start:end] for gradient in own]

    def _third_pass(self, micro_batches: deque[MicroBatch], gradients: list[Tensor | None]) -> Iterator[MicroBatch]:
        start = 0
        while micro_batches:
            micro = micro_batches.popleft()
            if micro.real:
                end = start + micro.samples
                self._at_work = start, [None if g is None else g[start:end] for g in gradients]
                start = end
            else:
                zeros = [None if g is None else g.new_zeros(micro.samples, *g.shape[1:]) for g in gradients]
                self._at_work = None, zeros
            yield micro
        self._first_pass, self._at_work = (), (None, [])  # otherwise gradients stay in memory until the next step

    def compute(self, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """A surrogate loss whose gradient for the embeddings is the cached one."""
        return self._compute(self._product_with_gradients, batch) if self._caches else super().compute(batch)

    def _product_with_gradients(self, model: nn.Module, batch: Any) -> tuple[Tensor, float, Metrics]:
        start, gradients = self._at_work
        found = tensors_in(contrastive.embed(self.task, model, batch))
        if self._first_pass and start is not None:
            self._require_same([tensor[start : start + len(found[0])] for tensor in self._first_pass], found)
        pairs = zip(found, gradients, strict=True)
        products = [_product(own, g) for own, g in pairs if g is not None and own.requires_grad]
        if not products:
            refuse_without_gradient(self.task.setting)
        return torch.stack(products).sum(), 0, {}

    def forward(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Totals]:
        """Totals are the whole step's, from pass 2."""
        loss, found = super().forward(micro, totals)
        return loss, self._step_totals if self._caches else found

    def scaled(self, loss: Tensor) -> Tensor:
        """Not scaled here: the cached gradients already are."""
        return loss if self._caches else super().scaled(loss)

    def _require_same(self, before: list[Tensor], now: list[Tensor]) -> None:
        """Raises UserError if pass 3 does not repeat pass 1: the gradients would belong to other embeddings. Reads
        values, which waits for the device: only in the first step of a process.
        """
        tolerance = 1e-3 if self.state.precision.mode == "fp32" else 2e-2
        for then, own in zip(before, now, strict=True):
            a, b = then.float(), own.detach().float()
            if a.shape != b.shape or float((a - b).norm()) > tolerance * float(a.norm()):
                raise UserError(
                    f"{self.task.setting}: embed() is not deterministic: calling it twice on the same batch gave "
                    "different results, so gradients cannot be cached; draw from the global generators, and keep state "
                    "in buffers (docs/oom.md), not in plain attributes"
                    + (", or use train.compile=false" if self.settings.compile else "")
                )


def _product(embeddings: Tensor, gradient: Tensor) -> Tensor:
    """The inner product, at least in fp32, so that the gradient is passed on unchanged."""
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return (embeddings.to(wide) * gradient.to(wide)).sum()


def _require_of_embeddings(loss: Tensor, setting: str) -> None:
    """Raises UserError for a loss that depends on parameters directly: they would get no gradient from it."""
    direct = list(parameters_behind(loss))
    if direct:
        raise UserError(
            f"{setting}: its loss_of_embeddings depends on a parameter of shape {list(direct[0].shape)}, which "
            "would get no gradient; use parameters only in embed (a trained temperature can multiply one of "
            "the embeddings)"
        )


def _no_piece(start: int, end: int) -> Any:
    raise AssertionError("an embedded micro-batch is not cut again")
