"""The inner loop: the page to read. What is done for each optimizer step, and in which order.

A step is a transaction. Its samples are fixed by the sampler's state; gradients are summed over micro-batches while
parameters and optimizer stay as they are, so that giving up is free; then one commit changes everything. The caller
(`runner`) catches an out-of-memory error that leaves `train`, takes the step back and calls `train` again.
"""

import contextlib
import time

from torch import Tensor

from trainapp.memory.timeline import Picture
from trainapp.tracking.meter import spread
from trainapp.train.evaluate import evaluate
from trainapp.train.run import Job
from trainapp.train.step import accumulate_gradients, clip, commit, drop_gradients
from trainapp.train.totals import Sums


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
