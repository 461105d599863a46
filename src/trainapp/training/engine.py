"""Compute a step's gradients and apply them: model, loss, strategy, optimizers with their schedules and loss scales.
Independent of data, files, sizes and trackers.

A run has one `Engine`, or a subclass: `in_backward` updates parameters inside the backward, `cached_gradients` is for
losses that compare samples.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainapp.checkpoint.train_state import TrainState, Update
from trainapp.config.schema import Train
from trainapp.data.batch import MicroBatch
from trainapp.draws import belong_to_samples
from trainapp.errors import TrainingStopped, UserError
from trainapp.losses.losses import Metrics, Task, can_be_chunked, evaluate_metrics
from trainapp.models.inspect import checked_gradients
from trainapp.optim.precision import NonFiniteCheck, Number, gradient_norm, scale_gradients
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.parallel.strategy import SingleDevice, trained_alone
from trainapp.rng import Drawing, Ledger, seed_from
from trainapp.snapshot import MOVED_ON, Snapshot
from trainapp.torch_private import backward, local
from trainapp.training.phase import PARTIAL, Phase, Step

Compute = Callable[[Task, Any], tuple[Any, ...]]
Around = Callable[[Any], contextlib.AbstractContextManager[None]]  # wraps the work on a batch or micro-batch


@dataclass
class Totals:
    """Sums of losses, counts and metrics, which stay on the device until `means`.

    A count is the number of samples or tokens, or the sum of their weights, however small.
    """

    loss: Number = 0.0
    count: Number = 0
    metrics: dict[str, tuple[Number, Number]] = field(default_factory=dict)  # this rank's sums and denominators
    samples: int = 0

    def plus(
        self, loss: Tensor, count: Number, metrics: Mapping[str, Number], samples: int = 0, real: bool = True
    ) -> "Totals":
        """These totals plus a micro-batch's; a dummy (`real=False`) adds nothing."""
        if not real:
            return self
        new_loss = _summand(loss)
        if isinstance(self.loss, Tensor):  # skipped for the first: saves an operation per step
            new_loss = self.loss + new_loss
        if type(count) is not int:  # fast path for plain integers
            count = _summand(count)
        new_count = self.count + count
        added = {}
        for name, value in metrics.items():
            total, denominator = self.metrics.get(name, (0, 0))
            # If all micro-batches so far have the metric, reuse the loss's count: saves an operation each.
            denominator = new_count if denominator is self.count else denominator + count
            added[name] = (total + _summand(value), denominator)
        return Totals(new_loss, new_count, self.metrics | added, self.samples + samples)

    def over(self, ranks: Ranks) -> "Totals":
        """Loss and count summed over all ranks, in one collective, whatever metrics each rank has."""
        if ranks.world == 1:
            return self
        loss, count = ranks.all_reduce_sum(torch.stack([_on(ranks.device, v) for v in (self.loss, self.count)]))
        return Totals(loss, count, self.metrics, self.samples)

    def means(self, ranks: Ranks | None = None) -> dict[str, float]:
        """`{"loss": ..., metric: ...}`; a metric is averaged over the micro-batches and ranks that have it. NaN if the
        count is 0. Waits for the device.

        ranks: adds up the metrics of all ranks (collective); None: only this rank's. Raises UserError for a negative
        count.
        """
        own = {name: (float(total), float(count)) for name, (total, count) in self.metrics.items()}
        sums: dict[str, tuple[float, float]] = {}
        for metrics in (ranks or SingleRank()).all_gather_object(own):
            for name, (total, count) in metrics.items():
                others_total, others_count = sums.get(name, (0.0, 0.0))
                sums[name] = (others_total + total, others_count + count)
        means = {"loss": _mean("loss", float(self.loss), float(self.count))}
        return means | {name: _mean(name, *sums_of) for name, sums_of in sums.items()}


class Engine:
    """Gradients summed over micro-batches, then one update. Call `begin` first.

    evaluated_task: the evaluation loss; `tasks`: each update's loss by name, if there are several. around: wraps
    `strategy.compute`, for example with offload. stateful_metrics: names of metrics that are not numbers.
    Attributes: phase, where in a step, or between two, the run is; is_first, whether nothing has been committed in this
    process, in which case losses and gradients are checked more closely; rehearses, whether gradients are computed only
    for comparison (`train.check_exactness`); accumulates, whether the step has gradients of earlier micro-batches;
    ledger, what is known of the forwards' draws; draws_for, the work and the key that they belong to, see `Drawing`.
    """

    def __init__(
        self,
        state: TrainState,
        strategy: SingleDevice,
        evaluated_task: Task,
        tasks: Mapping[str, Task],
        settings: Train,
        around: Callable[[Compute], Compute] | None = None,
        stateful_metrics: frozenset[str] = frozenset(),
        ledger: Ledger | None = None,
    ):
        self.state, self.strategy, self.ranks = state, strategy, strategy.ranks
        self.evaluated_task, self.tasks = evaluated_task, tasks
        self.settings, self.phase = settings, Phase.START
        self.snapshot = Snapshot.of(state.stateful, verified=2 * len(state.updates))
        self.nonfinite = NonFiniteCheck(settings.nonfinite, state.device, state.precision.scaler.is_enabled())
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.stateful_metrics = stateful_metrics
        self._compute = strategy.compute if around is None else around(strategy.compute)
        self._weights: dict[int, Tensor] = {}
        self.is_first, self.rehearses, self.accumulates = True, False, False
        self.draws_by_sample = belong_to_samples(settings.draws, state.device)
        self.ledger = ledger or Ledger()
        self.draws_for: tuple[str, tuple[int, ...]] = ("", ())
        self.step: Step  # set by `begin`, as the weight of the loss
        self.loss_weight: Tensor

    def begin(self, step: Step) -> None:
        """Start an update."""
        self.step, self.rehearses, self.accumulates = step, False, False
        self.draws_for = training_draws(step.update.name), (self.state.seed, step.attempt, step.update.number)
        # The true count is known only at the end (padding); `clip` corrects the scaling by samples.
        self.loss_weight = self.weight_of(step.samples)

    def seed(self, step: Step) -> None:
        """Seed the global generators, with numbers that are equal in a retry and in a resumed run."""
        seed_from(self.state.device, self.state.seed, step.attempt, step.update.number, self.ranks.rank)

    def drawing(self, micro: MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Use around forward and backward of a micro-batch, or its evaluation; for `train.draws=per_sample`."""
        if self.draws_by_sample:
            work, key = self.draws_for
            return Drawing(key, micro.positions, self.ledger, work)
        return contextlib.nullcontext()

    @property
    def task(self) -> Task:
        """The current update's loss."""
        return self.tasks.get(self.step.update.name, self.evaluated_task)

    @property
    def knows_loss(self) -> bool:
        """Whether every loss is built in."""
        return all(map(can_be_chunked, (self.evaluated_task, *self.tasks.values())))

    def alone(self, update: Update) -> contextlib.AbstractContextManager[None]:
        """Inside the block, only this update's parameters require gradients, if a step has several updates."""
        if len(self.state.updates) == 1:
            return contextlib.nullcontext()
        self.strategy.turn_to(update.number)
        return trained_alone(update.parameters, self.parameters)

    def weight_of(self, samples: int) -> Tensor:
        """1 / samples, cached per value; created on the device, because copying from the host would synchronize."""
        if samples not in self._weights:
            self._weights[samples] = torch.full((), 1.0 / samples, device=self.state.device)
        return self._weights[samples]

    def micro_batches(self, cut: Iterator[MicroBatch], watched: Around) -> Iterator[MicroBatch]:
        """The micro-batches to run forward and backward on. cut: the fetched and cut micro-batches."""
        return cut

    def forward(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Totals]:
        """The loss of a micro-batch, and the totals including it.

        A dummy micro-batch (`real=False`) keeps this rank in step with the others and adds nothing.
        """
        self.phase = Phase.FORWARD
        before = [p.grad for p in self.parameters] if self.is_first else None
        with self.step.update.precision.autocast:
            loss, count, metrics = self.compute(micro.data)
        if before is not None:
            require_same_gradients(self.parameters, before)
        self.phase = Phase.METRIC
        finished = evaluate_metrics(metrics, self.stateful_metrics) if self.step.is_logged else {}
        del metrics  # functions among them hold large tensors, such as logits, which must not live through the backward
        return loss, totals.plus(loss, count, finished, real=micro.real)

    def compute(self, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """The loss of a batch as a sum over its samples, its count, and metrics."""
        return self._compute(self.task, batch)

    def evaluate(self, task: Task, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """The loss of a batch in evaluation, its count, and metrics."""
        with self.state.precision.autocast:
            return self.strategy.evaluate(task, batch)

    def backward(self, loss: Tensor, micro: MicroBatch) -> None:
        """Accumulate gradients in `p.grad`."""
        self.phase = Phase.BACKWARD
        is_checked = self.is_first and micro.last
        with checked_gradients(self.state.model, loss) if is_checked else contextlib.nullcontext():
            backward(self.scaled(loss), self.loss_weight if micro.real else self.loss_weight * 0)
        self.accumulates = not micro.last

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by fp16's loss scale."""
        return self.step.update.precision.scaler.scale(loss)

    def reduce(self, totals: Totals) -> Totals:
        """Sum gradients and totals over all ranks. Collective."""
        if self.phase not in PARTIAL:
            self.phase = Phase.GRADIENTS
        self.strategy.finish_accumulation()
        return totals.over(self.ranks)

    def clip(self, totals: Totals) -> Tensor:
        """Unscale, divide by the true count, clip to `train.grad_clip`. Returns the gradient norm before clipping."""
        self.phase = Phase.UNSCALE
        update = self.step.update
        update.precision.unscale(update.optimizer, self.strategy.all_reduce_found_inf)
        self.phase = Phase.CLIP
        # Comparing the type is faster than looking up a shard's attribute, which most gradients lack.
        gradients = [g if type(g) is Tensor else local(g) for g in self.gradients()]
        norm = self.strategy.grad_norm(gradient_norm(gradients, self.norm_dtype(totals)))
        factor = count_factor(totals.count, self.step.samples, norm.device)
        if factor is not None:
            norm = norm * factor
        clipping = clip_factor(norm, self.settings.grad_clip)
        if clipping is not None:
            factor = clipping if factor is None else clipping * factor
        if factor is not None and gradients:  # divide and clip in one pass over the gradients
            scale_gradients(gradients, factor.to(norm.device))
        return norm

    def norm_dtype(self, totals: Totals) -> torch.dtype | None:
        """Accumulation dtype of the gradient norm; None: the gradients' dtype."""
        if may_be_extreme(totals.count, self.step.samples):
            return torch.float64
        return torch.float32 if self.step.update.precision.mode == "bf16_pure" else None

    def commit(self, totals: Totals, norm: Tensor) -> bool:
        """`optimizer.step()`. False if the step is skipped: for a non-finite value, or because its count is 0."""
        update, progress = self.step.update, self.state.progress
        self.ranks.check_peers()  # last chance to abort the step
        self.snapshot.note_step()
        applied = self.nonfinite.allows_update(progress.step, totals.loss, norm, totals.count, update.name)
        if applied:
            self.set_rates()
            self.phase = Phase.COMMIT
            applied = update.precision.step(update.optimizer)
            self.nonfinite.count(applied, progress.step, update=update.name)
        else:
            self.leave_out()
        self.is_first = False
        return applied

    def set_rates(self) -> None:
        """Set the learning rates of the coming update."""
        update = self.step.update
        update.schedule.set_rates(update.optimizer.param_groups, self.state.progress.step)

    def leave_out(self) -> None:
        """Restore the state before a skipped step. Collective. Raises TrainingStopped if a parameter was modified that
        had no copy.
        """
        self.step.update.precision.reset_scaler()
        self.snapshot.restore(but=MOVED_ON)  # BatchNorm's statistics have seen non-finite values
        lost = sorted({name for names in self.ranks.all_gather_object(self.snapshot.lost) for name in names})
        if lost:
            raise TrainingStopped(
                f"step {self.step.number}: train.nonfinite=skip cannot skip this step, because its forward is the "
                f"first to write parameters in place ({', '.join(lost[:5])}), of which there is no copy yet; the last "
                f"checkpoint is {self.nonfinite.last_checkpoint() or 'none'}. Make them buffers, which are always "
                "copied"
            )

    def gradients(self) -> list[Tensor]:
        """Gradients that currently exist."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def drop_gradients(self) -> None:
        """Like `optimizer.zero_grad(set_to_none=True)`, but 25 microseconds faster, without its profiler record."""
        for parameter in self.parameters:
            parameter.grad = None


def training_draws(update: str) -> str:
    """The name in the ledger of what an update's forwards draw."""
    return f"train {update}"


def require_same_gradients(parameters: Sequence[Tensor], before: Sequence[Tensor | None]) -> None:
    """Raises UserError if a task has replaced gradients: the sum over micro-batches would depend on their size."""
    if any(parameter.grad is not then for parameter, then in zip(parameters, before, strict=True)):
        raise UserError(
            "the task changes the gradients of the model's parameters, by calling backward() or zero_grad() itself: "
            "they hold the sum over the micro-batches so far; use torch.autograd.grad for gradients inside a task"
        )


def may_be_extreme(count: Number, samples: int) -> bool:
    """Whether gradients divided by `samples` instead of `count` may have squares beyond the range of fp32."""
    if isinstance(count, Tensor) and count.device.type != "cpu":  # reading the value would wait for the device
        return count.is_floating_point() and count.device.type != "mps"  # which has no fp64
    return not 1e-6 * samples <= float(count) <= 1e6 * samples


def count_factor(count: Number, samples: int, device: torch.device) -> Tensor | None:
    """The factor that turns a division by `samples` into one by `count`; None if the two are equal, or for a count of
    0, whose step is skipped.
    """
    if not isinstance(count, Tensor) and count in (0, samples):
        return None
    ratio = samples / count
    if isinstance(ratio, Tensor) or device.type == "cpu":
        return torch.as_tensor(ratio, device=device)
    return torch.full((), ratio, device=device)  # `as_tensor` would copy from the host and synchronize


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """The factor that clips gradients of this norm to `limit`; None if they need no clipping."""
    if limit is None:
        return None
    # Only on the CPU is reading a value free; there it saves four tiny operations, or a pass over all gradients.
    if norm.device.type == "cpu" and norm.item() <= limit:
        return None
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _on(device: torch.device, value: Number) -> Tensor:
    """The value in fp64 on `device`. Numbers are filled in: `as_tensor` would copy from the host and synchronize."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _summand(value: Number) -> Number:
    """The value detached, and at least in fp32: bf16 cannot count beyond 256."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach() if value.requires_grad else value
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _mean(name: str, total: float, count: float) -> float:
    if count < 0:
        raise UserError(
            f"task: the count that {name} is divided by is negative ({count:g}); return the number of samples or "
            "tokens, or the sum of their weights"
        )
    return total / count if count else math.nan
