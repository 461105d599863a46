"""The inner loop: the page to read. What is done for each optimizer step, and in which order.

A step is a transaction. Its samples are fixed by the sampler's state; gradients are summed over micro-batches while
parameters and optimizer stay as they are, so that giving up is free; then one commit changes everything. The caller
(`runner`) catches an out-of-memory error that leaves `train`, takes the step back and calls `train` again.
"""

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainapp.batching import EvalBatches, TrainBatches
from trainapp.checkpoint import Checkpoints
from trainapp.finite import FiniteGuard, gradient_norm
from trainapp.memory import DeviceMemory
from trainapp.meter import Meter
from trainapp.optim.schedules import Schedule
from trainapp.signals import StopRequest
from trainapp.state import RestorePoint, TrainState, preserved_rng
from trainapp.tasks import Task, evaluate_metrics
from trainapp.tracking import Tracker


@dataclass
class Sums:
    """Of losses, of what they were averaged over, and of metrics; on the device until somebody asks."""

    loss: Tensor | float = 0.0
    count: Tensor | int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    samples: int = 0

    def add(self, loss: Tensor, count: Tensor | int, metrics: dict[str, Tensor], samples: int = 0) -> None:
        """One more micro-batch."""
        self.loss, self.count, self.samples = self.loss + loss, self.count + count, self.samples + samples
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0) + value

    def means(self) -> dict[str, float]:
        """`{"loss": ..., metric: ...}`. Waits for the device."""
        count = max(1, int(self.count))
        return {name: float(value) / count for name, value in {"loss": self.loss, **self.metrics}.items()}


@dataclass
class Job:
    """Everything that the loop works with. `phase` tells where it is, for whoever catches an error."""

    state: TrainState
    task: Task
    batches: TrainBatches
    eval_batches: EvalBatches | None
    schedule: Schedule
    memory: DeviceMemory
    meter: Meter
    tracker: Tracker
    checkpoints: Checkpoints
    guard: FiniteGuard
    restore_point: RestorePoint
    stop: StopRequest
    config: dict[str, Any]  # as written into checkpoints
    objective: tuple[str, str]  # ("max", "accuracy")
    max_steps: int | None
    max_epochs: int | None
    log_every: int
    eval_every: int
    save_every: int
    grad_clip: float | None = None
    accumulation: int | None = None  # as many micro-batches as asked; None: what follows from the sizes
    phase: str = "start"
    evaluation: Sums = field(default_factory=Sums)  # what an interrupted evaluation has finished
    saved_at: int = 0

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end."""
        progress = self.state.progress
        done = self.max_steps is not None and progress.step >= self.max_steps
        return done or (self.max_epochs is not None and progress.epoch >= self.max_epochs)

    @property
    def on_last_step(self) -> bool:
        """Whether the coming step is the run's last."""
        progress = self.state.progress
        last = self.max_steps is not None and progress.step + 1 >= self.max_steps
        epoch = self.batches.after(progress.epoch, progress.consumed)[0]
        return last or (self.max_epochs is not None and epoch >= self.max_epochs)

    def due(self, every: int, done_at: int) -> bool:
        """Whether something with this cadence is still to be done at the present step."""
        step = self.state.progress.step
        return bool(every) and step != done_at and (step % every == 0 or self.finished)


def train(job: Job) -> None:
    """Steps until the end or a request to stop.

    An error leaves parameters and optimizer as at the last finished step, unless `job.phase` is "commit".
    """
    progress = job.state.progress
    while True:
        if job.eval_batches is not None and job.due(job.eval_every, progress.evaluated_at):
            evaluate(job)
        ends = job.finished or job.stop.signal is not None
        if job.due(job.save_every, job.saved_at) or (ends and job.saved_at != progress.step):
            save(job)
        if ends:
            return
        train_step(job)


def train_step(job: Job) -> None:
    """One optimizer step over the global batch."""
    state, progress = job.state, job.state.progress
    job.phase = "start"
    job.restore_point.take()
    logs = job.log_every > 0 and ((progress.step + 1) % job.log_every == 0 or job.on_last_step)
    watched = logs or not state.micro.proven
    with job.memory.watch(job.meter.resident_tensors()) if watched else contextlib.nullcontext():
        sums = accumulate_gradients(job, logs)
        norm = clip(job, sums)
        applied = commit(job, sums, norm)
    state.micro.succeeded()
    samples = job.batches.step_samples(progress)
    job.batches.advance(progress)
    job.meter.count(samples)
    if not applied:
        progress.skipped += 1
        return
    progress.step += 1
    job.tracker.progress.advance(progress.step)
    if logs:
        log(job, sums, norm)


def accumulate_gradients(job: Job, logs: bool) -> Sums:
    """Gradients of the step's loss, summed over its micro-batches; sums of loss, count and (if logged) metrics."""
    state, precision, sums = job.state, job.state.precision, Sums()
    state.optimizer.zero_grad(set_to_none=True)
    # The true count is known at the end only (padding); what was scaled by samples is put right in `clip`.
    weight = job.meter.weight(job.batches.step_samples(state.progress))
    job.phase = "data"
    for batch in job.meter.timed(job.batches.micro_batches(state.progress, state.micro.size, job.accumulation)):
        job.phase = "forward"
        with precision.autocast:
            loss, count, metrics = job.task(state.model, batch)
        job.phase = "backward"
        precision.scaler.scale(loss).backward(gradient=weight)
        job.phase = "metrics"
        sums.add(loss.detach(), count, evaluate_metrics(metrics) if logs else {})
        del batch, loss, metrics  # else they live on beside the next micro-batch's
        job.phase = "data"
    return sums


def clip(job: Job, sums: Sums) -> Tensor:
    """Unscale, divide by the true count, clip once. Returns the gradient norm before clipping."""
    job.phase = "clip"
    job.state.precision.scaler.unscale_(job.state.optimizer)
    gradients = [p.grad for p in job.meter.parameters if p.grad is not None]
    norm, factor = gradient_norm(gradients), None
    if isinstance(sums.count, Tensor) or sums.count != job.batches.step_samples(job.state.progress):
        count = sums.count.clamp(min=1) if isinstance(sums.count, Tensor) else max(1, sums.count)
        factor = torch.as_tensor(job.batches.step_samples(job.state.progress) / count, device=norm.device)
        norm = norm * factor
    if job.grad_clip is not None:
        allowed = (job.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        # Reading a number is free on the CPU only; there it saves a pass over all gradients.
        if norm.device.type != "cpu" or allowed < 1:
            factor = allowed if factor is None else allowed * factor
    if factor is not None:
        torch._foreach_mul_(gradients, factor.to(norm.device))
    return norm


def commit(job: Job, sums: Sums, norm: Tensor) -> bool:
    """Change the parameters: the only place. False when the step was skipped for a non-finite value."""
    state, scaler = job.state, job.state.precision.scaler
    if not job.guard.admits(state.progress.step, sums.loss, norm):
        state.precision.reset_scaler()
        return False
    for group in state.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * job.schedule(state.progress.step)
    job.phase = "commit"
    scale = scaler.get_scale() if scaler.is_enabled() else 0.0  # waits for the device, in fp16 only
    scaler.step(state.optimizer)
    scaler.update()
    job.phase = "committed"
    overflowed = scaler.is_enabled() and scaler.get_scale() < scale
    return job.guard.applied(not overflowed, state.progress.step)


def log(job: Job, sums: Sums, norm: Tensor) -> None:
    """The step's numbers. Waits for the device."""
    job.guard.check()
    progress, batches = job.state.progress, job.batches
    scalars = sums.means() | {
        "epoch": progress.samples / batches.epoch_samples,
        "lr": job.state.optimizer.param_groups[0]["lr"],
        "grad_norm": float(norm),
    }
    scalars |= job.meter.scalars(batches.accumulation(job.state.micro.size, job.accumulation))
    job.tracker.log(progress.step, progress.samples, scalars, job.objective[1])


@torch.no_grad()
def evaluate(job: Job) -> None:
    """The whole evaluation set, each sample once; goes on where an out-of-memory error interrupted it."""
    state, progress, started = job.state, job.state.progress, time.monotonic()
    job.guard.check()
    job.phase = "evaluate"
    state.model.eval()
    with preserved_rng(state.device):
        for samples, batch in job.eval_batches.from_sample(job.evaluation.samples, state.eval_micro.size):
            watched = not state.eval_micro.proven
            with job.memory.watch(job.meter.resident_tensors()) if watched else contextlib.nullcontext():
                with state.precision.autocast:
                    loss, count, metrics = job.task(state.model, batch)
                finished = evaluate_metrics(metrics)
            job.evaluation.add(loss, count, finished, samples)
            state.eval_micro.succeeded()
            del batch, loss, metrics, finished
    state.model.train()
    means, job.evaluation = job.evaluation.means(), Sums()
    progress.evaluated_at = progress.step
    job.meter.pause(time.monotonic() - started)
    job.tracker.evaluated(progress.step, progress.samples, means)
    direction, metric = job.objective
    progress.objective = means[metric]
    if progress.best is None or (means[metric] > progress.best) == (direction == "max"):
        progress.best, progress.best_step = means[metric], progress.step


def save(job: Job) -> None:
    """A checkpoint of the present step."""
    started, progress = time.monotonic(), job.state.progress
    job.guard.check()
    job.phase = "save"
    if job.checkpoints.enabled:
        is_best = progress.best_step == progress.step
        job.checkpoints.save(job.state.state_dict(), progress.step, job.config, is_best)
    job.saved_at = progress.step
    job.meter.pause(time.monotonic() - started)
