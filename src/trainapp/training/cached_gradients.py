"""Gradient caching: exact gradients of a loss that compares the samples of its batch, for any micro-batch.

For a task with `whole_batch = True`, `embed` and `loss_of_embeddings` a step has three passes:

1. every micro-batch is embedded without gradients;
2. the loss of all embeddings, those of all ranks included, and its gradients for the embeddings;
3. every micro-batch is embedded again, now with gradients, and the cached gradient of its embeddings goes backward.

The third pass repeats the first: from the same generators (dropout drops the same), and with all that the first has
written undone (BatchNorm counts a batch once). It costs one more forward. In memory at once are the inputs and the
embeddings of this rank's share of the step, those of all ranks in the second pass, and the activations of one
micro-batch.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", arXiv:2101.06983.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainapp.data.batch import MicroBatch, tensors_in
from trainapp.errors import TrainingStopped, UserError
from trainapp.losses import contrastive
from trainapp.losses.losses import Metrics, evaluate_metrics, has_embeddings, refuse_without_gradient
from trainapp.models.inspect import parameters_behind
from trainapp.parallel.ranks import gather_rows
from trainapp.rng import seed_from
from trainapp.snapshot import MOVED_ON
from trainapp.training.engine import Engine, Number, Totals, Watched
from trainapp.training.phase import Phase


class _Embedded(NamedTuple):
    """A micro-batch of the first pass, and its embeddings."""

    micro: MicroBatch
    tensors: list[Tensor]


class CachedGradients(Engine):
    """The engine of a loss of embeddings. Its gradients are those of the third pass, whose micro-batches
    `micro_batches` returns after the first two.
    """

    _first_pass: Sequence[Tensor] = ()  # in the first step, what the third pass must repeat

    @property
    def _own(self) -> Any:
        """The task of the update at work, with `embed`, `loss_of_embeddings` and `setting`."""
        return self.task

    @property
    def _caches(self) -> bool:
        """Whether the update at work has such a loss."""
        return has_embeddings(self.task)

    def micro_batches(self, cut: Iterator[MicroBatch], watched: Watched) -> Iterator[MicroBatch]:
        """Those of the first pass, with the same tensors."""
        if not self._caches:
            return cut
        embedded, structure = self._embed(cut, watched)
        self._step_totals, gradients = self._backward_to_embeddings(embedded, structure, watched)
        self.weight = self.weight_of(1)  # the gradients are weighed already
        self.snapshot.restore_generators()
        seed_from(self.state.device, self.state.seed, self.step.attempt, self.step.update.number, self.ranks.rank)
        return self._third_pass(embedded, gradients)

    def _embed(self, cut: Iterator[MicroBatch], watched: Watched) -> tuple[deque[_Embedded], Any]:
        """The first pass, of which no trace is left; and the embeddings of one micro-batch as they were returned."""
        found = deque[_Embedded]()
        structure: Any = None
        for micro in cut:
            self.attempt.phase = Phase.FORWARD
            with watched(micro.data):
                structure = self._without_gradients(micro)
            # Not `piece`, which holds all of a larger batch that this one was cut from.
            micro = micro._replace(piece=_no_piece)
            found.append(_Embedded(micro, tensors_in(structure)))
            self.attempt.phase = Phase.DATA
        self.snapshot.restore(but=MOVED_ON)
        if self.snapshot.lost:
            names = ", ".join(self.snapshot.lost[:5])
            raise TrainingStopped(
                f"{self._own.setting}: its embed writes parameters in place ({names}), of which there is no copy "
                "yet; with gradient caching it runs twice per step. Make them buffers, which are always copied"
            )
        return found, structure

    def _without_gradients(self, micro: MicroBatch) -> Any:
        """As in the third pass, bit for bit; a compiled forward without gradients would be other code."""

        def call(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            found = contrastive.embed(self.task, model, batch, micro.samples)
            return tensors_in(found)[0], found

        with torch.set_grad_enabled(self.settings.compile), self.state.precision.autocast:
            _, found = self.strategy.evaluate(call, micro.data)
        # Copies: a view would keep all that it is a part of, such as the features of all tokens.
        return contrastive.like(found, [tensor.detach().clone() for tensor in tensors_in(found)])

    def _backward_to_embeddings(
        self, embedded: deque[_Embedded], structure: Any, watched: Watched
    ) -> tuple[Totals, deque[list[Tensor | None]]]:
        """The second pass. Returns the step's totals, on the first rank only since all have the same, and for each
        micro-batch the gradients of its embeddings: None for one that needs none.
        """
        task, precision, step = self._own, self.state.precision, self.step
        self.attempt.phase = Phase.FORWARD
        with watched([own.micro.data for own in embedded]):
            whole, start, end = gather_rows(self.ranks, _joined(embedded, task.setting), task.setting)
            if self.is_first:
                self._first_pass = [tensor[start:end].detach() for tensor in whole]
            leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in whole]
            seed_from(self.state.device, self.state.seed, step.attempt, step.update.number)  # the same on all ranks
            with precision.autocast:
                loss, count, metrics = task.loss_of_embeddings(contrastive.like(structure, leaves))
            if self.is_first:
                _require_of_embeddings(loss, task.setting)
            self.attempt.phase = Phase.METRIC
            finished = evaluate_metrics(metrics, self.stateful_metrics) if step.is_logged else {}
            del metrics
            totals = Totals().plus(loss, count, finished, real=self.ranks.is_rank_zero)
            self.attempt.phase = Phase.BACKWARD
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            weight = self.weight_of(step.samples).to(loss.dtype)
            found = iter(torch.autograd.grad(precision.scaler.scale(loss), trained, weight, allow_unused=True))
            own = [next(found) if leaf.requires_grad else None for leaf in leaves]
        self.attempt.phase = Phase.DATA
        return totals, _cut(embedded, [None if gradient is None else gradient[start:end] for gradient in own])

    def _third_pass(self, embedded: deque[_Embedded], gradients: deque[list[Tensor | None]]) -> Iterator[MicroBatch]:
        done = 0
        while embedded:
            micro, _ = embedded.popleft()
            self._at_work = done if micro.real else None, gradients.popleft()
            done += micro.samples * micro.real
            yield micro
        self._first_pass, self._at_work = (), (None, [])  # else the gradients stay in memory until the next step

    def compute(self, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """A loss whose gradient for the embeddings is the cached one."""
        return self._compute(self._product_with_gradients, batch) if self._caches else super().compute(batch)

    def _product_with_gradients(self, model: nn.Module, batch: Any) -> tuple[Tensor, float, Metrics]:
        start, gradients = self._at_work
        found = tensors_in(contrastive.embed(self.task, model, batch))
        if self._first_pass and start is not None:
            self._require_same([tensor[start : start + len(found[0])] for tensor in self._first_pass], found)
        pairs = zip(found, gradients, strict=True)
        products = [_product(own, g) for own, g in pairs if g is not None and own.requires_grad]
        if not products:
            refuse_without_gradient(self._own.setting)
        return torch.stack(products).sum(), 0, {}

    def forward(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Totals]:
        """The totals are those of the whole step, which the second pass knows."""
        loss, found = super().forward(micro, totals)
        return loss, self._step_totals if self._caches else found

    def scaled(self, loss: Tensor) -> Tensor:
        """The cached gradients are."""
        return loss if self._caches else super().scaled(loss)

    def _require_same(self, before: list[Tensor], now: list[Tensor]) -> None:
        """Raises UserError where the third pass does not repeat the first: the gradients would be of other embeddings.
        Reads values, which waits for the device: in the first step of a process.
        """
        tolerance = 1e-3 if self.state.precision.mode == "fp32" else 2e-2
        for a, b in zip(before, now, strict=True):
            if a.shape != b.shape or float((a.float() - b.detach().float()).norm()) > tolerance * float(
                a.float().norm()
            ):
                raise UserError(
                    f"{self._own.setting}: its embed returns something else when it is repeated on the same "
                    "batch, so that gradients cannot be cached; draw from the global generators, and keep state in "
                    "buffers (docs/oom.md), not in plain attributes"
                    + (", or use train.compile=false" if self.settings.compile else "")
                )


def _joined(embedded: deque[_Embedded], setting: str) -> list[Tensor]:
    """The embeddings of this rank's micro-batches, which are then kept no longer one by one."""
    real = [own.tensors for own in embedded if own.micro.real]
    joined = contrastive.join(real or [[t[:0] for t in embedded[0].tensors]], setting)
    for place, own in enumerate(embedded):
        if own.micro.real:
            embedded[place] = own._replace(tensors=[])
    return joined


def _cut(embedded: deque[_Embedded], gradients: list[Tensor | None]) -> deque[list[Tensor | None]]:
    """By micro-batch; of zeros for a dummy."""
    cut, done = deque[list[Tensor | None]](), 0
    for micro, tensors in embedded:
        if micro.real:
            cut.append([None if g is None else g[done : done + micro.samples] for g in gradients])
            done += micro.samples
        else:
            pairs = zip(gradients, tensors, strict=True)
            cut.append([None if g is None else torch.zeros_like(own, dtype=g.dtype) for g, own in pairs])
    return cut


def _product(embeddings: Tensor, gradient: Tensor) -> Tensor:
    """A scalar in fp32 at least, so that the gradient is passed on as it is."""
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return (embeddings.to(wide) * gradient.to(wide)).sum()


def _require_of_embeddings(loss: Tensor, setting: str) -> None:
    """Raises UserError for a loss that depends on parameters directly: they would get no gradient from it."""
    direct = list(parameters_behind(loss))
    if direct:
        raise UserError(
            f"{setting}: its loss_of_embeddings depends on a parameter of shape {list(direct[0].shape)}, which "
            "would get no gradient; use parameters in embed only (a temperature that is trained can multiply one of "
            "the embeddings)"
        )


def _no_piece(start: int, end: int) -> Any:
    raise AssertionError("an embedded micro-batch is not cut again")
