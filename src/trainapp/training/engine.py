"""What computes the gradients of a step and commits it: model, loss, strategy, optimizers with their schedules and loss
scales. It knows no data, files, sizes or trackers.

There is one engine per run. `in_backward` and `cached_gradients` have others, for an update inside the backward and for
losses that compare samples.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainapp.checkpoint.train_state import TrainState
from trainapp.data.batch import MicroBatch
from trainapp.errors import TrainingStopped
from trainapp.losses.losses import Metrics, Task, evaluate_metrics
from trainapp.optim.precision import NonFiniteCheck, gradient_norm, scale_gradients
from trainapp.parallel.strategy import SingleDevice, locals_of
from trainapp.snapshot import MOVED_ON, Snapshot
from trainapp.torch_private import backward
from trainapp.training.gradient_check import checked_gradients, gradients_of, require_same_gradients
from trainapp.training.phase import Phase
from trainapp.training.session import Attempt, Session, Step
from trainapp.training.totals import Number, Totals


class Engine:
    """Gradients summed over micro-batches, then one update. Call `begin` first.

    evaluated_task: the loss; in `tasks`, that of each update by name, where there are several.
    stateful_metrics: names of metrics that are not numbers. is_first: until the first commit of this process, losses
    and gradients are looked at more closely. rehearses: whether gradients are computed only to be compared
    (`debug=exactness`).
    """

    def __init__(
        self,
        state: TrainState,
        strategy: SingleDevice,
        evaluated_task: Task,
        tasks: Mapping[str, Task],
        nonfinite: NonFiniteCheck,
        snapshot: Snapshot,
        attempt: Attempt,
        grad_clip: float | None,
    ):
        self.state, self.strategy, self.ranks = state, strategy, strategy.ranks
        self.nonfinite, self.snapshot, self.attempt = nonfinite, snapshot, attempt
        self.grad_clip = grad_clip
        self.parameters = [p for p in state.model.parameters() if p.requires_grad]
        self.stateful_metrics: frozenset[str] = frozenset()
        self.evaluated_task, self.tasks = evaluated_task, tasks
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
        return self.tasks.get(self.state.update.name, self.evaluated_task)

    def weight_of(self, samples: int) -> Tensor:
        """1 / samples, a scalar on the device: created once per step size, and filled there, since a copy waits."""
        if samples not in self._weights:
            self._weights[samples] = torch.full((), 1.0 / samples, device=self.state.device)
        return self._weights[samples]

    def micro_batches(self, session: Session, cut: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Those to compute gradients of, from those that were fetched and cut."""
        return cut

    def forward(self, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Totals]:
        """The loss of a micro-batch, and the totals with it.

        A dummy micro-batch (`real=False`) keeps this rank in step with the others and adds nothing.
        """
        self.attempt.phase = Phase.FORWARD
        before = gradients_of(self.parameters) if self.is_first else None
        with self.state.precision.autocast:
            loss, count, metrics = self.compute(micro.data)
        if before is not None:
            require_same_gradients(self.parameters, before)
        self.attempt.phase = Phase.METRIC
        finished = evaluate_metrics(metrics, self.stateful_metrics) if self.step.is_logged else {}
        del metrics  # functions among them hold what they compute from, such as all logits: not through the backward
        return loss, totals.plus(loss, count, finished, real=micro.real)

    def compute(self, batch: Any) -> tuple[Tensor, Number, Metrics]:
        """The loss of a batch as a sum over its samples, its count, and metrics."""
        return self.strategy.compute(self.task, batch)

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
        return self.state.precision.scaler.scale(loss)

    def reduce(self, totals: Totals) -> Totals:
        """Gradients and totals of all ranks. Collective."""
        if not self.attempt.phase.is_torn:
            self.attempt.phase = Phase.GRADIENTS
        self.strategy.finish_accumulation()
        return totals.over(self.ranks)

    def clip(self, totals: Totals) -> Tensor:
        """Unscale, divide by the true count, clip to `train.grad_clip`. Returns the gradient norm before clipping."""
        self.attempt.phase = Phase.UNSCALE
        self.state.precision.unscale(self.state.optimizer, self.strategy.all_reduce_found_inf)
        self.attempt.phase = Phase.CLIP
        gradients = locals_of(self.gradients())
        norm = self.strategy.grad_norm(gradient_norm(gradients, self.norm_dtype(totals)))
        factor = count_factor(totals.count, self.step.samples, norm.device)
        if factor is not None:
            norm = norm * factor
        clipping = clip_factor(norm, self.grad_clip)
        if clipping is not None:
            factor = clipping if factor is None else clipping * factor
        if factor is not None and gradients:  # both in one pass over the gradients
            scale_gradients(gradients, factor.to(norm.device))
        return norm

    def norm_dtype(self, totals: Totals) -> torch.dtype | None:
        """In which the squares of gradients are added up; None: their own."""
        if may_be_extreme(totals.count, self.step.samples):
            return torch.float64
        return self.state.precision.norm_dtype

    def commit(self, totals: Totals, norm: Tensor) -> bool:
        """`optimizer.step()`. False if the step is left out: for a value that is not finite, or because nothing in it
        counts.
        """
        state, progress, name = self.state, self.state.progress, self.step.update.name
        self.ranks.check_peers()  # the last moment at which a step can be aborted
        self.snapshot.note_step()
        applied = self.nonfinite.allows_update(progress.step, totals.loss, norm, totals.count, name)
        if applied:
            self.set_rates()
            self.attempt.phase = Phase.COMMIT
            applied = state.precision.step(state.optimizer)
            self.nonfinite.count(applied, progress.step, update=name)
        else:
            self.leave_out()
        self.is_first = False
        return applied

    def set_rates(self) -> None:
        """The learning rates of the coming update."""
        self.state.update.schedule.set_rates(self.state.optimizer.param_groups, self.state.progress.step)

    def leave_out(self) -> None:
        """Undo what the forward of a skipped step has written. Collective. Raises TrainingStopped where it has written
        parameters of which there was no copy.
        """
        self.state.precision.reset_scaler()
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
