"""The inner loop: the page to read. What is done for each optimizer step, and in which order.

A step is a transaction. Its samples are fixed by the sampler's state; gradients are summed over micro-batches while
parameters and optimizer stay as they are, so that giving up is free; then one commit changes everything. The caller
(`runner`) catches an out-of-memory error that leaves `train`, takes the step back and calls `train` again.
"""

import contextlib
import time

import torch
from torch import Tensor

from trainapp.batches import MicroBatch, batch_length
from trainapp.errors import UserError
from trainapp.finite import gradient_norm
from trainapp.job import Job, Sums
from trainapp.meter import spread
from trainapp.parallel.placement import local
from trainapp.state import preserved_rng
from trainapp.tasks import evaluate_metrics
from trainapp.timeline import Picture


def train(job: Job) -> None:
    """Steps until the end or a request to stop.

    An error leaves parameters and optimizer as at the last finished step, unless `job.phase` is "commit".
    """
    progress = job.state.progress
    while True:
        job.phase = "weight average"
        job.state.average.catch_up(progress.step)
        if job.eval_batches is not None and job.due(job.eval_every, progress.evaluated_at):
            evaluate(job)
        ends = job.finished or job.stopping > 0
        if job.due(job.save_every, job.saved_at) or (ends and job.saved_at != progress.step):
            save(job)
        if ends:
            job.saver.finish()
            return
        train_step(job)


def train_step(job: Job) -> None:
    """One optimizer step over the global batch."""
    state, progress, memory = job.state, job.state.progress, job.memory
    job.phase, job.attempt_started = "start", time.monotonic()  # no part of the step: nothing to go back to yet
    job.restore_point.take()
    job.phase = "data"
    if progress.step + 1 in job.size_plan:
        state.micro.force(job.size_plan.pop(progress.step + 1))
    job.ranks.start_agreement(job.flags)
    job.ranks.arm(state.micro.trying)
    logs, draws = job.logs_coming_step, job.draws_coming_step
    watched = (logs and memory.wants_look) or draws or state.micro.trying
    with memory.watch(job.meter.resident(), where=state.micro.untried) if watched else contextlib.nullcontext():
        sums = accumulate_gradients(job, logs)
        norm = clip(job, sums)
        applied = commit(job, sums, norm)
    job.tracker.progress.advance(progress.step)
    if applied and logs:
        log(job, sums, norm)
    if draws:
        draw_timeline(job)
    drop_gradients(job)  # now, so that an evaluation has their room
    job.stopping, still_writing, news = job.ranks.finish_agreement()
    look_for_larger_size(job, bool(news))
    if not still_writing:
        job.saver.finish()


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


def look_for_larger_size(job: Job, news: bool) -> None:
    """After clean steps, try a size between what works and what failed; all ranks the same.

    news: whether any rank has some for the search.
    """
    micro, step, searching = job.state.micro, job.state.progress.step, not job.state.micro.settled
    job.phase = "search"
    for size in micro.succeeded(job.ranks, news).values():
        job.tracker.note(f"step {step + 1} tries a larger micro-batch: {size}")
    if searching and micro.settled:
        job.tracker.note(f"the search ended with micro-batch {micro.size} at step {step}")


def log(job: Job, sums: Sums, norm: Tensor) -> None:
    """The step's numbers. Waits for the device."""
    job.phase = "log"
    job.guard.check()
    progress, batches = job.state.progress, job.batches
    scalars = sums.means() | {
        "epoch": progress.samples / batches.epoch_samples,
        "lr": job.state.optimizer.param_groups[0]["lr"],
        "grad_norm": float(norm),
    }
    scalars |= job.meter.scalars(batches.accumulation(job.state.micro.size, job.accumulation))
    scalars |= spread(scalars, job.ranks)
    job.tracker.log(progress.step, progress.samples, scalars, job.objective[1])


@torch.no_grad()
def evaluate(job: Job) -> None:
    """The whole evaluation set, each sample once; goes on where an out-of-memory error interrupted it."""
    state, progress, started = job.state, job.state.progress, time.monotonic()
    job.guard.check()
    job.phase, job.attempt_started = "evaluate", started
    if job.evaluation is None:  # not after an error: a rank that evaluates by itself recovers by itself
        # Each rank proves its size by batches of its own, of which some have more than others: one decides for all.
        job.ranks.arm(job.ranks.smallest(-int(state.eval_micro.trying)) < 0)
        job.strategy.share_buffers()
        job.evaluation = Sums()
    state.model.eval()
    with preserved_rng(state.device), state.average.in_place_of_weights():
        for fetched in job.eval_batches.from_sample(job.evaluation.samples, state.eval_micro.size, job.ranks):
            for micro in state.eval_micro.split(fetched, job.eval_ranks):
                evaluate_batch(job, micro)
    if job.strategy.equal_batches:
        job.strategy.gradients_ready()
        state.eval_micro.succeeded(job.ranks, news=True)  # some may have met shapes that are new to others
    state.model.train()
    means, job.evaluation = job.evaluation.over(job.ranks).means(), None
    progress.evaluated_at = progress.step
    job.meter.pause(time.monotonic() - started)
    job.tracker.evaluated(progress.step, progress.samples, means)
    direction, metric = job.objective
    if metric not in means:
        raise UserError(f"objective={direction} {metric}: there is no such metric; there are {', '.join(means)}")
    progress.objective = means[metric]
    if progress.best is None or (means[metric] > progress.best) == (direction == "max"):
        progress.best, progress.best_step = means[metric], progress.step


def evaluate_batch(job: Job, micro: MicroBatch) -> None:
    """One evaluation micro-batch. Its sums count only once all of it is done."""
    state, memory = job.state, job.memory
    watched = state.eval_micro.watched
    with memory.watch(job.meter.resident(micro.data)) if watched else contextlib.nullcontext():
        with state.precision.autocast:
            loss, count, metrics = job.task(job.strategy.evaluate, micro.data)
        finished = evaluate_metrics(metrics)
    job.evaluation.add(loss, count, finished, batch_length(micro.data), micro.real)
    state.eval_micro.succeeded(job.eval_ranks)


def draw_timeline(job: Job) -> None:
    """The picture of this step's memory, by kind."""
    job.phase = "log"
    step, started = job.state.progress.step, time.monotonic()
    events, kinds = job.memory.events(job.meter.gradients())
    if events:
        path = job.tracker.run_dir / "memory_timeline.png"
        title = f"memory of step {step}, micro-batch {job.state.micro.size}"
        job.tracker.picture("memory_timeline", Picture(events, kinds, job.memory.budget, title, path), step)
    job.memory.keep_events = job.timeline = False
    job.meter.pause(time.monotonic() - started)


def save(job: Job) -> None:
    """A checkpoint of the present step."""
    started, progress = time.monotonic(), job.state.progress
    job.guard.check()
    job.phase = "save"
    if job.checkpoints.enabled:
        job.strategy.share_buffers()
        job.saver.save(progress.step, job.config, is_best=progress.best_step == progress.step)
    job.saved_at = progress.step
    job.meter.pause(time.monotonic() - started)
