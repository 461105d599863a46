"""The parts of an optimizer step: gradients of all micro-batches, clipping, the update."""

import contextlib

import torch
from torch import Tensor

from trainapp.data.micro_batch import MicroBatch
from trainapp.optim.nonfinite import gradient_norm
from trainapp.parallel.dtensor import local
from trainapp.train.losses import evaluate_metrics
from trainapp.train.run import Job
from trainapp.train.totals import Sums


def drop_gradients(job: Job) -> None:
    """As `optimizer.zero_grad(set_to_none=True)`, without the 25 microseconds of its profiler record."""
    for parameter in job.meter.parameters:
        parameter.grad = None


def accumulate_gradients(job: Job, logs: bool) -> Sums:
    """Gradients of the step's loss, summed over its micro-batches; sums of loss, count and (if logged) metrics."""
    state, sums = job.state, Sums()
    # The true count is known at the end only (padding); what was scaled by samples is put right in `clip`.
    weight = job.meter.weight(job.batches.step_samples(state.progress))
    micro_batches = job.batches.micro_batches(state.progress, state.micro.size, job.accumulation)
    for fetched in job.meter.timed(micro_batches):
        for micro in state.micro.split(fetched, job.ranks):
            watched = job.memory.watching or state.micro.watched
            watch = job.memory.watch(job.meter.resident(micro.data)) if watched else contextlib.nullcontext()
            with job.strategy.micro_batch(micro.last), watch:
                backward(job, micro, weight, sums, logs)
            job.phase = "data"
    job.phase = "gradients"
    job.strategy.gradients_ready()
    return sums.over(job.ranks)


def backward(job: Job, micro: MicroBatch, weight: Tensor, sums: Sums, logs: bool) -> None:
    """Forward, loss and backward of one micro-batch: gradients add up in the parameters.

    One that is not real takes part in the ranks' joint work and counts for nothing.
    """
    precision = job.state.precision
    job.phase = "forward"
    with precision.autocast:
        loss, count, metrics = job.task(job.strategy.forward, micro.data)
    job.phase = "backward"
    precision.scaler.scale(loss).backward(gradient=weight if micro.real else weight * 0)
    job.phase = "metric"
    sums.add(loss.detach(), count, evaluate_metrics(metrics) if logs else {}, real=micro.real)


def clip(job: Job, sums: Sums) -> Tensor:
    """Unscale, divide by the true count, clip once. Returns the gradient norm before clipping."""
    job.phase = "unscale"
    job.state.precision.unscale(job.state.optimizer, job.strategy.agree_on_overflow)
    job.phase = "clip"
    gradients = [local(p.grad) for p in job.meter.parameters if p.grad is not None]
    norm, factor = job.strategy.norm(gradient_norm(gradients)), None
    if isinstance(sums.count, Tensor) or sums.count != job.batches.step_samples(job.state.progress):
        count = sums.count.clamp(min=1) if isinstance(sums.count, Tensor) else max(1, sums.count)
        factor = torch.as_tensor(job.batches.step_samples(job.state.progress) / count, device=norm.device)
        norm = norm * factor
    if job.grad_clip is not None:
        # Reading a number is free on the CPU only; there it saves four tiny operations, or a pass over all gradients.
        value = norm.item() if norm.device.type == "cpu" else norm
        if norm.device.type != "cpu" or not value <= job.grad_clip:
            allowed = (job.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            factor = allowed if factor is None else allowed * factor
    if factor is not None:
        torch._foreach_mul_(gradients, factor.to(norm.device))
    return norm


def commit(job: Job, sums: Sums, norm: Tensor) -> bool:
    """Change the parameters and count the step: the only place. False when a non-finite value left the step out."""
    state, progress, scaler = job.state, job.state.progress, job.state.precision.scaler
    job.ranks.gate()  # the last moment at which a step can be given up
    applied = job.guard.admits(progress.step, sums.loss, norm)
    if applied:
        for group in state.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * job.schedule(progress.step)
        job.phase = "commit"
        scale = scaler.get_scale() if scaler.is_enabled() else 0.0  # waits for the device, in fp16 only
        scaler.step(state.optimizer)
        scaler.update()
        applied = job.guard.applied(not scaler.is_enabled() or scaler.get_scale() >= scale, progress.step)
    else:
        state.precision.reset_scaler()
        job.restore_point.restore_buffers()  # BatchNorm has seen what was not finite
    job.note_size()
    job.meter.count(job.batches.step_samples(progress))
    job.batches.advance(progress)
    progress.step += applied
    progress.skipped += not applied
    job.phase = "committed"
    return applied
