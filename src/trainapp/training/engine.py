"""What computes the gradients of a step and commits it: model, loss, strategy, optimizers with their schedules and loss
scales. It knows no data, files, sizes or trackers.

There is one engine per run. `in_backward` and `cached_gradients` have others, for an update inside the backward and for
losses that compare samples.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.checkpoint.train_state import TrainState, Update
from trainapp.config.schema import Train
from trainapp.data.batch import MicroBatch
from trainapp.errors import TrainingStopped, UserError
from trainapp.losses.losses import Metrics, Task, evaluate_metrics, is_built_in
from trainapp.models.inspect import checked_gradients
from trainapp.optim.precision import NonFiniteCheck, gradient_norm, scale_gradients
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.parallel.strategy import SingleDevice, locals_of, trained_alone
from trainapp.snapshot import MOVED_ON, Snapshot
from trainapp.torch_private import backward
from trainapp.training.phase import Attempt, Phase, Step

Number = Tensor | float
Compute = Callable[[Task, Any], tuple[Any, ...]]
Watched = Callable[[Any], contextlib.AbstractContextManager[None]]  # of a batch: around what is computed from it


class Metric(NamedTuple):
    """The sum of a metric, and of the counts of the micro-batches that have it."""

    total: Number
    denominator: Number


@dataclass
class Totals:
    """Sums of losses, of what they are averaged over, and of metrics. They stay on the device until `means`.

    A count is a number of samples or tokens, or a sum of their weights, however small.
    """

    loss: Number = 0.0
    count: Number = 0
    metrics: dict[str, Metric] = field(default_factory=dict)  # this rank's; `means` adds those of the others
    samples: int = 0

    def plus(
        self, loss: Tensor, count: Number, metrics: Mapping[str, Number], samples: int = 0, real: bool = True
    ) -> "Totals":
        """These and a micro-batch's; a dummy (`real=False`) adds nothing."""
        if not real:
            return self
        new_loss = _summand(loss)
        if isinstance(self.loss, Tensor):  # not for the first: saves an operation per step
            new_loss = self.loss + new_loss
        if type(count) is not int:  # the usual case, without a call
            count = _summand(count)
        new_count = self.count + count
        added = {}
        for name, value in metrics.items():
            total, denominator = self.metrics.get(name, (0, 0))
            # Where all micro-batches so far have the metric, it is the loss's count: that saves an operation each.
            denominator = new_count if denominator is self.count else denominator + count
            added[name] = Metric(total + _summand(value), denominator)
        return Totals(new_loss, new_count, self.metrics | added, self.samples + samples)

    def over(self, ranks: Ranks) -> "Totals":
        """Loss and count summed over all ranks. One collective, whatever metrics each rank has."""
        if ranks.world == 1:
            return self
        loss, count = ranks.all_reduce_sum(torch.stack([_on(ranks.device, v) for v in (self.loss, self.count)]))
        return Totals(loss, count, self.metrics, self.samples)

    def means(self, ranks: Ranks | None = None) -> dict[str, float]:
        """`{"loss": ..., metric: ...}`; a metric is averaged over the micro-batches and ranks that have it. NaN where
        the count is 0. Waits for the device.

        ranks: collective, the metrics of all of them; None: this rank's alone. Raises UserError for a negative count.
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

    evaluated_task: the loss; in `tasks`, that of each update by name, where there are several. around: what a forward
    is computed within, such as offload; called with `strategy.compute`. stateful_metrics: names of metrics that are not
    numbers.
    Attributes: is_first, whether nothing has been committed
    in this process: until then, losses and gradients are checked further; rehearses, whether gradients are computed
    only to be compared (`train.check_exactness`).
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
    ):
        self.state, self.strategy, self.ranks = state, strategy, strategy.ranks
        self.evaluated_task, self.tasks = evaluated_task, tasks
        self.settings, self.attempt = settings, Attempt()
        self.snapshot = Snapshot.of(state.stateful, verified=2 * len(state.updates))
        self.nonfinite = NonFiniteCheck(settings.nonfinite, state.device, state.precision.scaler.is_enabled())
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.stateful_metrics = stateful_metrics
        self._compute = strategy.compute if around is None else around(strategy.compute)
        self._weights: dict[int, Tensor] = {}
        self.is_first = True

    def begin(self, step: Step) -> None:
        """Turn to this step, or to this update of it."""
        self.step, self.rehearses = step, False
        # The true count is known only at the end (padding); `clip` corrects what was scaled by samples.
        self.weight = self.weight_of(step.samples)

    @property
    def task(self) -> Task:
        """The loss of the update at work."""
        return self.tasks.get(self.step.update.name, self.evaluated_task)

    @property
    def knows_loss(self) -> bool:
        """Whether every loss is one of the application's own."""
        return all(map(is_built_in, (self.evaluated_task, *self.tasks.values())))

    def alone(self, update: Update) -> contextlib.AbstractContextManager[None]:
        """Where a step has several updates: inside, only the parameters of this one require gradients."""
        if len(self.state.updates) == 1:
            return contextlib.nullcontext()
        self.strategy.turn_to(update.number)
        return trained_alone(update.parameters, self.parameters)

    def weight_of(self, samples: int) -> Tensor:
        """1 / samples, a scalar on the device: created once per step size, and filled there, since a copy waits."""
        if samples not in self._weights:
            self._weights[samples] = torch.full((), 1.0 / samples, device=self.state.device)
        return self._weights[samples]

    def micro_batches(self, cut: Iterator[MicroBatch], watched: Watched) -> Iterator[MicroBatch]:
        """The micro-batches to run forward and backward on. cut: as fetched and cut."""
        return cut

    def forward(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Totals]:
        """The loss of a micro-batch, and the totals with it.

        A dummy micro-batch (`real=False`) keeps this rank in step with the others and adds nothing.
        """
        self.attempt.phase = Phase.FORWARD
        before = [p.grad for p in self.parameters] if self.is_first else None
        with self.step.update.precision.autocast:
            loss, count, metrics = self.compute(micro.data)
        if before is not None:
            require_same_gradients(self.parameters, before)
        self.attempt.phase = Phase.METRIC
        finished = evaluate_metrics(metrics, self.stateful_metrics) if self.step.is_logged else {}
        del metrics  # functions among them hold what they compute from, such as all logits: not through the backward
        return loss, totals.plus(loss, count, finished, real=micro.real)

    def compute(self, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """The loss of a batch as a sum over its samples, its count, and metrics."""
        return self._compute(self.task, batch)

    def evaluate(self, task: Task, micro: MicroBatch) -> tuple[Tensor, Number, Metrics]:
        """The loss of a micro-batch without training, its count, and metrics."""
        with self.state.precision.autocast:
            loss, count, metrics = self.strategy.evaluate(task, micro.data)
        return loss, count, metrics

    def backward(self, loss: Tensor, micro: MicroBatch) -> None:
        """Gradients add up in `p.grad`."""
        self.attempt.phase = Phase.BACKWARD
        with self._around_backward(loss, micro):
            backward(self.scaled(loss), self.weight if micro.real else self.weight * 0)

    def _around_backward(self, loss: Tensor, micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        if self.is_first and micro.last:
            return checked_gradients(self.state.model, loss)
        return contextlib.nullcontext()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, multiplied by fp16's loss scale."""
        return self.step.update.precision.scaler.scale(loss)

    def reduce(self, totals: Totals) -> Totals:
        """Gradients and totals of all ranks. Collective."""
        if not self.attempt.phase.is_partial:
            self.attempt.phase = Phase.GRADIENTS
        self.strategy.finish_accumulation()
        return totals.over(self.ranks)

    def clip(self, totals: Totals) -> Tensor:
        """Unscale, divide by the true count, clip to `train.grad_clip`. Returns the gradient norm before clipping."""
        self.attempt.phase = Phase.UNSCALE
        update = self.step.update
        update.precision.unscale(update.optimizer, self.strategy.all_reduce_found_inf)
        self.attempt.phase = Phase.CLIP
        gradients = locals_of(self.gradients())
        norm = self.strategy.grad_norm(gradient_norm(gradients, self.norm_dtype(totals)))
        factor = count_factor(totals.count, self.step.samples, norm.device)
        if factor is not None:
            norm = norm * factor
        clipping = clip_factor(norm, self.settings.grad_clip)
        if clipping is not None:
            factor = clipping if factor is None else clipping * factor
        if factor is not None and gradients:  # both in one pass over the gradients
            scale_gradients(gradients, factor.to(norm.device))
        return norm

    def norm_dtype(self, totals: Totals) -> torch.dtype | None:
        """In which the squares of gradients are added up; None: their own."""
        if may_be_extreme(totals.count, self.step.samples):
            return torch.float64
        return self.step.update.precision.norm_dtype

    def commit(self, totals: Totals, norm: Tensor) -> bool:
        """`optimizer.step()`. False if the step is left out: for a value that is not finite, or because nothing in it
        counts.
        """
        update, progress = self.step.update, self.state.progress
        self.ranks.check_peers()  # the last moment at which a step can be aborted
        self.snapshot.note_step()
        applied = self.nonfinite.allows_update(progress.step, totals.loss, norm, totals.count, update.name)
        if applied:
            self.set_rates()
            self.attempt.phase = Phase.COMMIT
            applied = update.precision.step(update.optimizer)
            self.nonfinite.count(applied, progress.step, update=update.name)
        else:
            self.leave_out()
        self.is_first = False
        return applied

    def set_rates(self) -> None:
        """The learning rates of the coming update."""
        update = self.step.update
        update.schedule.set_rates(update.optimizer.param_groups, self.state.progress.step)

    def leave_out(self) -> None:
        """Undo what the forward of a skipped step has written. Collective. Raises TrainingStopped where it has written
        parameters of which there was no copy.
        """
        self.step.update.precision.reset_scaler()
        self.snapshot.restore(but=MOVED_ON)  # BatchNorm's statistics have seen non-finite values
        lost = sorted({name for names in self.ranks.all_gather_object(self.snapshot.lost) for name in names})
        if lost:
            raise TrainingStopped(
                f"step {self.step.number}: train.nonfinite=skip cannot leave this step out, because its forward is the "
                f"first to write parameters in place ({', '.join(lost[:5])}), of which there is no copy yet; the last "
                f"checkpoint is {self.nonfinite.last_checkpoint() or 'none'}. Make them buffers, which are always "
                "copied"
            )

    def gradients(self) -> list[Tensor]:
        """Gradients that currently exist."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def drop_gradients(self) -> None:
        """As `optimizer.zero_grad(set_to_none=True)`, without the 25 microseconds of its profiler record."""
        for parameter in self.parameters:
            parameter.grad = None


def require_same_gradients(parameters: Sequence[Tensor], before: Sequence[Tensor | None]) -> None:
    """Raises UserError where a task has replaced gradients: the sum over micro-batches would depend on their size."""
    if any(parameter.grad is not then for parameter, then in zip(parameters, before, strict=True)):
        raise UserError(
            "the task changes the gradients of the model's parameters, by a backward() or a zero_grad() of its own: "
            "they hold the sum over the micro-batches so far; use torch.autograd.grad for gradients inside a task"
        )


def may_be_extreme(count: Number, samples: int) -> bool:
    """Whether gradients that are divided by `samples` instead of `count` may have squares beyond the range of fp32."""
    if isinstance(count, Tensor) and count.device.type != "cpu":  # reading the value would wait for the device
        return count.is_floating_point() and count.device.type != "mps"  # which has no fp64
    return not 1e-6 * samples <= float(count) <= 1e6 * samples


def count_factor(count: Number, samples: int, device: torch.device) -> Tensor | None:
    """The factor from gradients divided by `samples` to gradients divided by `count`; None if the two are equal, and
    for a count of 0: such a step is left out.
    """
    if not isinstance(count, Tensor) and count in (0, samples):
        return None
    ratio = samples / count
    if isinstance(ratio, Tensor) or device.type == "cpu":
        return torch.as_tensor(ratio, device=device)
    return torch.full((), ratio, device=device)  # `as_tensor` would copy it from the host and wait for the device


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """The factor that clips gradients of this norm to `limit`; None where they need no clipping."""
    if limit is None:
        return None
    # Reading a number is free only on the CPU; there it saves four tiny operations, or a pass over all gradients.
    if norm.device.type == "cpu" and norm.item() <= limit:
        return None
    return (limit / (norm + 1e-6)).clamp(max=1.0)


# --- numbers and tensors


def _on(device: torch.device, value: Number) -> Tensor:
    """fp64 on `device`. A number becomes a fill: `as_tensor` would copy it from the host and wait for the device."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _summand(value: Number) -> Number:
    """Without its graph, and in fp32 at least: bf16 counts no further than 256."""
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
