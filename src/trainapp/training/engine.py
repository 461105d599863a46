"""Compute a step's gradients and apply them: model, loss, strategy, optimizers with their schedules and loss scales.
Independent of data, files, sizes and trackers.

A run has one `Engine`, or a subclass: `in_backward` updates parameters inside the backward, `cached_gradients` is for
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
from trainapp.draws.random_operations import belong_to_samples
from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws
from trainapp.errors import TrainingStopped, UserError
from trainapp.losses.losses import Metrics, MetricSum, Task, can_be_chunked, evaluate_metrics
from trainapp.models.inspect import checked_gradients
from trainapp.optim.optimizers import require_no_closure
from trainapp.optim.precision import NonFiniteCheck, Number, gradient_norm, scale_gradients
from trainapp.parallel.ranks import Ranks, SingleRank
from trainapp.parallel.strategy import CALLS_BACKWARD, Strategy, requires_grad_only
from trainapp.rng import seed_from
from trainapp.state.snapshot import MOVED_ON, Snapshot
from trainapp.torch_private import backward, local, version_of
from trainapp.training.phase import Phase, UpdateContext

Compute = Callable[[Task, Any], tuple[Any, ...]]
BatchContext = Callable[[Any], contextlib.AbstractContextManager[None]]  # for the work on a batch or micro-batch


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
        self, loss: Tensor, count: Number, metrics: Mapping[str, MetricSum], samples: int = 0, real: bool = True
    ) -> "Totals":
        """Return these totals plus a micro-batch's; a dummy (`real=False`) adds nothing. metrics: see
        `evaluate_metrics`.
        """
        if not real:
            return self
        # Loss and count.
        new_loss = _summand(loss)
        if isinstance(self.loss, Tensor):  # skipped for the first: saves an operation per step
            new_loss = self.loss + new_loss
        if type(count) is not int:  # fast path for plain integers
            count = _summand(count)
        new_count = self.count + count

        # Sum the metrics, each with the denominator of the micro-batches that have it.
        added = {}
        for name, value in metrics.items():
            total, denominator = self.metrics.get(name, (0, 0))
            if isinstance(value, tuple):
                metric_sum, metric_count = value
                denominator = denominator + _summand(metric_count)
            else:
                metric_sum = value
                # If all micro-batches so far have the metric, reuse the loss's count: saves an operation each.
                denominator = new_count if denominator is self.count else denominator + count
            added[name] = (total + _summand(metric_sum), denominator)
        return Totals(new_loss, new_count, self.metrics | added, self.samples + samples)

    def over(self, ranks: Ranks) -> "Totals":
        """Return loss and count summed over all ranks, in one collective, whatever metrics each rank has."""
        if ranks.world_size == 1:
            return self
        loss_here = _on(ranks.device, self.loss)
        count_here = _on(ranks.device, self.count)
        loss, count = ranks.all_reduce_sum(torch.stack([loss_here, count_here]))
        return Totals(loss, count, self.metrics, self.samples)

    def means(self, ranks: Ranks | None = None) -> dict[str, float]:
        """Return `{"loss": ..., metric: ...}`; a metric is averaged over the micro-batches and ranks that have it. NaN
        if the count is 0. Waits for the device. Raises UserError for a negative count.

        Args:
            ranks: adds up the metrics of all ranks (collective); None: only this rank's.
        """
        # Read this rank's sums, which waits for the device.
        metrics_here = {}
        for name, (total, count) in self.metrics.items():
            metrics_here[name] = (float(total), float(count))

        # Add up those of the ranks that have the metric.
        totals: dict[str, float] = {}
        counts: dict[str, float] = {}
        metrics_by_rank = (ranks or SingleRank()).all_gather_object(metrics_here)
        for metrics in metrics_by_rank:
            for name, (total, count) in metrics.items():
                totals[name] = totals.get(name, 0.0) + total
                counts[name] = counts.get(name, 0.0) + count

        means = {"loss": _mean("loss", float(self.loss), float(self.count))}
        for name, total in totals.items():
            means[name] = _mean(name, total, counts[name])
        return means


class UpdateResult(NamedTuple):
    """What an update has computed."""

    totals: Totals  # of all ranks
    norm: Tensor  # of the gradient, before clipping
    applied: bool  # otherwise it was skipped


class InPhase:
    """A context manager whose block is in a phase of the step.

    It restores the phase before only after success: recovery reads which one failed once all blocks have been left.
    Not a generator, which would take four times as long, several times per step.
    """

    __slots__ = ("before", "engine", "phase")

    def __init__(self, engine: "Engine", phase: Phase):
        self.engine = engine
        self.phase = phase

    def __enter__(self) -> None:
        self.before = self.engine.phase
        self.engine.phase = self.phase

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.engine.phase = self.before


class Engine:
    """Gradients summed over micro-batches, then one update. Call `begin` first.

    Args:
        state: model, optimizers and all else that a checkpoint holds.
        strategy: how the model is spread over the ranks.
        evaluated_task: the evaluation loss.
        tasks: each update's loss by name, if there are several.
        settings: those of `train`.
        wrap_compute: wraps `strategy.compute`, for example with offload.
        stateful_metrics: names of metrics that are not numbers.
        draw_record: what is known of the forwards' draws.

    Attributes:
        phase: where in a step, or between two, the run is, or where it failed; set by `at`.
        totals: this rank's sums of the current accumulation.
        is_first: whether nothing has been committed in this process, in which case losses and gradients are checked
            more closely.
        only_compares: whether gradients are computed only for comparison (`train.check_exactness`).
        accumulates: whether the step has gradients of earlier micro-batches.
        draws_for: the work and the key that the forwards' draws belong to, see `SampleDraws`.
        context: the current update.
    """

    def __init__(
        self,
        state: TrainState,
        strategy: Strategy,
        evaluated_task: Task,
        tasks: Mapping[str, Task],
        settings: Train,
        wrap_compute: Callable[[Compute], Compute] | None = None,
        stateful_metrics: frozenset[str] = frozenset(),
        draw_record: DrawRecord | None = None,
    ):
        self.state = state
        self.strategy = strategy
        self.ranks = strategy.ranks
        self.evaluated_task = evaluated_task
        self.tasks = tasks
        self.settings = settings
        self.stateful_metrics = stateful_metrics
        self.draw_record = draw_record or DrawRecord()
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        # What divides gradients: in fp32, 1/6 would round those of an fp64 model.
        is_double = any(p.dtype is torch.float64 for p in self.parameters)
        self.factor_dtype = torch.float64 if is_double else torch.float32
        # Compare checksums until every update has been made once, and in one more step.
        verified_updates = (state.first_steps + 1) * len(state.updates)
        self.snapshot = Snapshot.of(state.stateful, verified=verified_updates)
        self.nonfinite = NonFiniteCheck(settings.nonfinite, state.device, state.precision.scaler.is_enabled())
        self.draws_by_sample = belong_to_samples(settings.draws, state.device)
        self._compute: Compute = strategy.compute
        if wrap_compute is not None:
            self._compute = wrap_compute(strategy.compute)
        self._weights: dict[int, Tensor] = {}  # see `weight_of`

        self.phase = Phase.START
        self._commit_has_begun = False  # from the first change until `finish_update` or a restore: see `reported_phase`
        self.totals = Totals()
        self.is_first = True
        self.only_compares = False
        self.accumulates = False
        self.draws_for: tuple[str, tuple[int, ...]] = ("", ())
        self.context: UpdateContext  # set by `begin`, as the weight of the loss
        self.loss_weight: Tensor

    def at(self, phase: Phase) -> InPhase:
        """Return a context manager whose block is in this phase."""
        return InPhase(self, phase)

    @property
    def reported_phase(self) -> Phase:
        """The phase as recovery, reports and plans see it: a partly applied update fails as a whole."""
        return Phase.COMMIT if self._commit_has_begun else self.phase

    def begin(self, context: UpdateContext) -> None:
        """Start an update."""
        self.context = context
        self.only_compares = False
        self.accumulates = False

        # What the forwards draw is equal in a retry and in a resumed run.
        key = (self.state.seed, context.batch_number, context.update.number)
        self.draws_for = (training_draws(context.update.name), key)
        # The true count is known only at the end (padding); `clip` corrects the scaling by samples.
        self.loss_weight = self.weight_of(context.samples)

    def seed(self, context: UpdateContext) -> None:
        """Seed the global generators, with numbers that are equal in a retry and in a resumed run."""
        update = context.update.number
        seed_from(self.state.device, self.state.seed, context.batch_number, update, self.ranks.rank)

    def sample_draws(self, micro: MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for forward and backward of a micro-batch, or its evaluation, in which random
        numbers belong to samples (`train.draws=per_sample`).
        """
        if not self.draws_by_sample:
            return contextlib.nullcontext()
        work, key = self.draws_for
        return SampleDraws(key, micro.positions, self.draw_record, work)

    @property
    def task(self) -> Task:
        """The current update's loss."""
        return self.tasks.get(self.context.update.name, self.evaluated_task)

    @property
    def knows_loss(self) -> bool:
        """Whether every loss is built in."""
        tasks = (self.evaluated_task, *self.tasks.values())
        return all(map(can_be_chunked, tasks))

    def train_only(self, update: Update) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which only this update's parameters require gradients."""
        if len(self.state.updates) == 1:
            return contextlib.nullcontext()
        self.strategy.select_update(update.number)
        return requires_grad_only(update.parameters, self.parameters)

    def weight_of(self, samples: int) -> Tensor:
        """Return 1 / samples, cached by value; created on the device: copying from the host would synchronize."""
        if samples not in self._weights:
            weight = torch.full((), 1.0 / samples, dtype=self.factor_dtype, device=self.state.device)
            self._weights[samples] = weight
        return self._weights[samples]

    def prepare(self, micro_batches: Iterator[MicroBatch], watched: BatchContext) -> Iterator[MicroBatch]:
        """Start an accumulation. Return the micro-batches to run forward and backward on.

        Args:
            micro_batches: fetched, and split to the size that fits.
            watched: watches the memory of work on a batch, see `training.memory_watch`.
        """
        self.totals = Totals()
        return micro_batches

    def forward(self, micro: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch, and add it to the totals.

        A dummy micro-batch (`real=False`) keeps this rank in step with the others and adds nothing.
        """
        with self.at(Phase.FORWARD):
            gradients_before = None
            if self.is_first or self.snapshot.verifies:  # check that the task leaves the sum so far alone
                gradients_before = gradients_with_versions(self.parameters)
            with self.context.update.precision.autocast:
                loss, count, metrics = self.compute(micro.data)
            if gradients_before is not None:
                require_same_gradients(self.parameters, gradients_before)
        self.add_to_totals(micro, loss, count, metrics)
        return loss

    def add_to_totals(self, micro: MicroBatch, loss: Tensor, count: Number, metrics: Metrics) -> None:
        """Add a micro-batch's loss and count to the totals; in a logged step also its metrics."""
        with self.at(Phase.METRIC):
            metric_sums: dict[str, MetricSum] = {}
            if self.context.is_logged:
                metric_sums = evaluate_metrics(metrics, self.stateful_metrics)
            self.totals = self.totals.plus(loss, count, metric_sums, real=micro.real)

    def compute(self, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """Return the loss of a batch as a sum over its samples, its count, and metrics."""
        return self._compute(self.task, batch)

    def evaluate(self, task: Task, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """Return the loss of a batch in evaluation, its count, and metrics."""
        with self.state.precision.autocast:
            return self.strategy.evaluate(task, batch)

    def backward(self, loss: Tensor, micro: MicroBatch) -> None:
        """Accumulate gradients in `p.grad`."""
        with self.at(Phase.BACKWARD):
            weight = self.loss_weight
            if not micro.real:
                weight = weight * 0
            checked: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self.is_first and micro.last:
                checked = checked_gradients(self.state.model, loss)
            with checked:
                backward(self.scaled(loss), weight)
            self.accumulates = not micro.last

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss, multiplied by fp16's loss scale."""
        return self.context.update.precision.scaler.scale(loss)

    def reduce(self) -> Totals:
        """Sum gradients and totals over all ranks. Return the totals. Collective."""
        with self.at(Phase.GRADIENTS):
            self.strategy.finish_accumulation()
            return self.totals.over(self.ranks)

    def clip(self, totals: Totals) -> Tensor:
        """Unscale, divide by the true count, clip to `train.grad_clip`. Return the gradient norm before clipping."""
        update = self.context.update
        with self.at(Phase.UNSCALE):
            update.precision.unscale(update.optimizer, self.strategy.all_reduce_found_inf)
        with self.at(Phase.CLIP):
            return self._clip_unscaled(totals)

    def _clip_unscaled(self, totals: Totals) -> Tensor:
        # Comparing the type is faster than looking up a shard's attribute, which most gradients lack.
        gradients = [g if type(g) is Tensor else local(g) for g in self.gradients()]

        # Of sharded gradients, each rank has a part of the norm.
        norm_here = gradient_norm(gradients, self.norm_dtype(totals))
        norm = self.strategy.grad_norm(norm_here)

        # The gradients are divided and clipped in one pass.
        factor = count_factor(totals.count, self.context.samples, norm.device, self.factor_dtype)
        if factor is not None:
            norm = norm * factor
        clipping = clip_factor(norm, self.settings.grad_clip)
        if clipping is not None:
            factor = clipping if factor is None else clipping * factor
        if factor is not None and gradients:
            scale_gradients(gradients, factor.to(norm.device))
        return norm

    def norm_dtype(self, totals: Totals) -> torch.dtype | None:
        """Return the dtype in which the gradient norm is summed; None: the gradients' dtype."""
        if may_be_extreme(totals.count, self.context.samples):
            return torch.float64
        if self.context.update.precision.mode == "bf16_pure":
            return torch.float32
        return None

    def commit(self, totals: Totals, norm: Tensor) -> bool:
        """Apply the update: `optimizer.step()`. Return False if the step is skipped: for a non-finite value, or because
        its count is 0.
        """
        update = self.context.update
        progress = self.state.progress

        # Decide whether to apply the update, while the step can still be undone.
        with self.at(Phase.CLIP):
            self.ranks.check_peers()  # last chance to abort the step
            checked = self.strategy.checked_update() if self.snapshot.verifies else contextlib.nullcontext()
            self.snapshot.record_step_writes()
            applied = self.nonfinite.allows_update(progress.step, totals.loss, norm, totals.count, update.name)
            if applied:
                self.set_rates()
            else:
                self.skip_step()

        # From here on an error may leave the update half applied. Of a skipped one progress changes, too.
        self._commit_has_begun = True  # until `finish_update`
        if applied:
            with self.at(Phase.COMMIT), checked:
                try:
                    applied = update.precision.step(update.optimizer)
                except (AssertionError, TypeError) as error:
                    setting = f"updates.{update.number}.optimizer" if update.name else "optimizer"
                    require_no_closure(update.optimizer, error, setting)
                    raise
                if not applied and progress.step == 0 and progress.skipped == 0:
                    update.precision.lower_first_scale(float(totals.count) / self.context.samples)
                self.nonfinite.record_outcome(applied, progress.step, update=update.name)
        self.is_first = False
        return applied

    def finish_update(self) -> None:
        """End the update, whether applied or skipped: from now on there is nothing to undo."""
        self.forget_update()

    def forget_update(self) -> None:
        """Forget the update, also one that was rolled back. Frees the tensors of its totals."""
        self._commit_has_begun = False
        self.totals = Totals()

    def set_rates(self) -> None:
        """Set the learning rates of the coming update."""
        update = self.context.update
        update.schedule.set_rates(update.optimizer.param_groups, self.state.progress.step)

    def skip_step(self) -> None:
        """Restore the state before a skipped step. Collective. Raises TrainingStopped if a parameter was modified that
        had no copy.
        """
        self.context.update.precision.reset_scaler()
        self.snapshot.restore(except_kinds=MOVED_ON)  # BatchNorm's statistics have seen non-finite values
        lost_by_rank = self.ranks.all_gather_object(self.snapshot.lost)
        lost = sorted(set().union(*lost_by_rank))
        if lost:
            last_checkpoint = self.nonfinite.last_checkpoint() or "none"
            raise TrainingStopped(
                f"step {self.context.step_number}: train.nonfinite=skip cannot skip this step, because its forward is "
                f"the first to write parameters in place ({', '.join(lost[:5])}), of which there is no copy yet; the "
                f"last checkpoint is {last_checkpoint}. Make them buffers, which are always copied"
            )

    def gradients(self) -> list[Tensor]:
        """Return the gradients that currently exist."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def drop_gradients(self) -> None:
        """Set all gradients to None, 25 microseconds faster than `optimizer.zero_grad`, without its profiler record."""
        for parameter in self.parameters:
            parameter.grad = None


def training_draws(update: str) -> str:
    """Return the name in the record of what an update's forwards draw."""
    return f"train {update}"


def gradients_with_versions(parameters: Sequence[Tensor]) -> list[tuple[Tensor | None, int]]:
    """Return the gradient of each parameter, and its version: a backward writes to one that is there."""
    gradients = [parameter.grad for parameter in parameters]
    return [(gradient, 0 if gradient is None else version_of(gradient)) for gradient in gradients]


def require_same_gradients(parameters: Sequence[Tensor], before: Sequence[tuple[Tensor | None, int]]) -> None:
    """Raise UserError if a task has changed gradients: the sum over micro-batches would depend on their size."""
    for (gradient, version), (gradient_before, version_before) in zip(
        gradients_with_versions(parameters), before, strict=True
    ):
        if gradient is not gradient_before or version != version_before:
            raise UserError(CALLS_BACKWARD)


def may_be_extreme(count: Number, samples: int) -> bool:
    """Return whether gradients divided by `samples` instead of `count` may have squares beyond the range of fp32."""
    if isinstance(count, Tensor) and count.device.type != "cpu":  # reading the value would wait for the device
        return count.is_floating_point() and count.device.type != "mps"  # which has no fp64
    return not 1e-6 * samples <= float(count) <= 1e6 * samples


def count_factor(count: Number, samples: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return the factor that turns a division by `samples` into one by `count`; None if the two are equal, or for a
    count of 0, whose step is skipped.

    Args:
        count: the true count.
        samples: the divisor so far.
        device: the factor's device.
        dtype: the factor's dtype, at least.
    """
    if isinstance(count, Tensor):
        ratio = samples / (count.double() if dtype is torch.float64 else count)
        return ratio.to(device)
    if count in (0, samples):
        return None
    return torch.full((), samples / count, dtype=dtype, device=device)  # `as_tensor` would synchronize


def clip_factor(norm: Tensor, limit: float | None) -> Tensor | None:
    """Return the factor that clips gradients of this norm to `limit`; None if they need no clipping."""
    if limit is None:
        return None
    # Only on the CPU is reading a value free; there it saves four tiny operations, or a pass over all gradients.
    if norm.device.type == "cpu" and norm.item() <= limit:
        return None
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _on(device: torch.device, value: Number) -> Tensor:
    """Return the value in fp64 on `device`. A number is filled in: `as_tensor` would copy from the host and wait."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _summand(value: Number) -> Number:
    """Return the value detached, and at least in fp32: bf16 cannot count beyond 256."""
    if not isinstance(value, Tensor):
        return value
    if value.requires_grad:
        value = value.detach()
    if value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def _mean(name: str, total: float, count: float) -> float:
    if count < 0:
        raise UserError(
            f"task: the count that {name} is divided by is negative ({count:g}); return the number of samples or "
            "tokens, or the sum of their weights"
        )
    return total / count if count else math.nan
