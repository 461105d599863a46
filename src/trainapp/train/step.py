"""The parts of an optimizer step: gradients of all micro-batches, clipping, the update."""

import contextlib

import torch
from torch import Tensor

from trainapp.data.micro_batch import MicroBatch
from trainapp.optim.nonfinite import gradient_norm
from trainapp.parallel.dtensor import local
from trainapp.train.losses import evaluate_metrics
from trainapp.train.run import Run
from trainapp.train.totals import Totals


def drop_gradients(run: Run) -> None:
    """As `optimizer.zero_grad(set_to_none=True)`, without the 25 microseconds of its profiler record."""
    for parameter in run.meter.parameters:
        parameter.grad = None


def accumulate_gradients(run: Run, logs: bool) -> Totals:
    """Gradients of the step's loss, summed over its micro-batches; totals of loss, count and (if logged) metrics."""
    state, totals = run.state, Totals()
    # The true count is known at the end only (padding); what was scaled by samples is put right in `clip`.
    weight = run.meter.weight(run.batches.step_samples(state.progress))
    micro_batches = run.batches.micro_batches(state.progress, state.micro.size, run.accumulation)
    for fetched in run.meter.timed(micro_batches):
        for micro in state.micro.cut(fetched, run.ranks):
            watched = run.memory.watching or state.micro.needs_watching
            watch = run.memory.watch(run.meter.resident(micro.data)) if watched else contextlib.nullcontext()
            with run.strategy.micro_batch(micro.last), watch:
                backward(run, micro, weight, totals, logs)
            run.phase = "data"
    run.phase = "gradients"
    run.strategy.finish_accumulation()
    return totals.over(run.ranks)


def backward(run: Run, micro: MicroBatch, weight: Tensor, totals: Totals, logs: bool) -> None:
    """Forward, loss and backward of one micro-batch: gradients add up in the parameters.

    One that is not real takes part in the ranks' joint work and counts for nothing.
    """
    precision = run.state.precision
    run.phase = "forward"
    with precision.autocast:
        loss, count, metrics = run.task(run.strategy.forward, micro.data)
    run.phase = "backward"
    precision.scaler.scale(loss).backward(gradient=weight if micro.real else weight * 0)
    run.phase = "metric"
    totals.add(loss.detach(), count, evaluate_metrics(metrics) if logs else {}, real=micro.real)


def clip(run: Run, totals: Totals) -> Tensor:
    """Unscale, divide by the true count, clip once. Returns the gradient norm before clipping."""
    run.phase = "unscale"
    run.state.precision.unscale(run.state.optimizer, run.strategy.all_reduce_found_inf)
    run.phase = "clip"
    gradients = [local(p.grad) for p in run.meter.parameters if p.grad is not None]
    norm, factor = run.strategy.grad_norm(gradient_norm(gradients)), None
    if isinstance(totals.count, Tensor) or totals.count != run.batches.step_samples(run.state.progress):
        count = totals.count.clamp(min=1) if isinstance(totals.count, Tensor) else max(1, totals.count)
        factor = torch.as_tensor(run.batches.step_samples(run.state.progress) / count, device=norm.device)
        norm = norm * factor
    if run.grad_clip is not None:
        # Reading a number is free on the CPU only; there it saves four tiny operations, or a pass over all gradients.
        value = norm.item() if norm.device.type == "cpu" else norm
        if norm.device.type != "cpu" or not value <= run.grad_clip:
            allowed = (run.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            factor = allowed if factor is None else allowed * factor
    if factor is not None:
        torch._foreach_mul_(gradients, factor.to(norm.device))
    return norm


def commit(run: Run, totals: Totals, norm: Tensor) -> bool:
    """Change the parameters and count the step: the only place. False when a non-finite value left the step out."""
    state, progress, scaler = run.state, run.state.progress, run.state.precision.scaler
    run.ranks.check_peers()  # the last moment at which a step can be given up
    applied = run.guard.admits(progress.step, totals.loss, norm)
    if applied:
        for group in state.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * run.schedule(progress.step)
        run.phase = "commit"
        scale = scaler.get_scale() if scaler.is_enabled() else 0.0  # waits for the device, in fp16 only
        scaler.step(state.optimizer)
        scaler.update()
        applied = run.guard.applied(not scaler.is_enabled() or scaler.get_scale() >= scale, progress.step)
    else:
        state.precision.reset_scaler()
        run.restore_point.restore_buffers()  # BatchNorm has seen what was not finite
    run.note_size()
    run.meter.count(run.batches.step_samples(progress))
    run.batches.advance(progress)
    progress.step += applied
    progress.skipped += not applied
    run.phase = "committed"
    return applied
