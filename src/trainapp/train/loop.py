"""The inner loop: the page to read. What is done for each optimizer step, and in which order.

A step is a transaction. Its samples are fixed by the sampler's state; gradients are summed over micro-batches while
parameters and optimizer stay as they are, so that giving up is free; then one commit changes everything. The caller
(`runner`) catches an out-of-memory error that leaves `train`, takes the step back and calls `train` again.
"""

import contextlib
import time
from typing import Any

from torch import Tensor

from trainapp.memory.timeline import Picture
from trainapp.tracking.meter import spread
from trainapp.train.evaluate import evaluate
from trainapp.train.run import Run
from trainapp.train.step import accumulate_gradients, clip, commit, drop_gradients
from trainapp.train.totals import Totals


def train(run: Run) -> None:
    """Steps until the end or a request to stop.

    An error leaves parameters and optimizer as at the last finished step, unless `run.phase` is "commit".
    """
    progress = run.state.progress
    while True:
        run.phase = "weight average"
        run.state.average.catch_up(progress.step)
        if run.eval_batches is not None and run.due(run.eval_every, progress.evaluated_at):
            evaluate(run)
        ends = run.finished or run.stopping > 0
        if run.due(run.save_every, run.checkpointer.saved_at) or (ends and run.checkpointer.saved_at != progress.step):
            save(run)
        if ends:
            run.checkpointer.finish()
            return
        train_step(run)


def train_step(run: Run) -> None:
    """One optimizer step over the global batch."""
    state, progress, memory = run.state, run.state.progress, run.memory
    run.phase, run.attempt_started = "start", time.monotonic()  # no part of the step: nothing to go back to yet
    run.restore_point.take()
    run.phase = "data"
    if progress.step + 1 in run.size_plan:
        state.micro.force(run.size_plan.pop(progress.step + 1))
    run.ranks.start_agreement(run.flags)
    run.ranks.enable_votes(state.micro.trying)
    logs, draws = run.logs_coming_step, run.draws_coming_step
    watched = (logs and memory.wants_look) or draws or state.micro.trying
    with memory.watch(run.meter.resident(), where=state.micro.untried) if watched else contextlib.nullcontext():
        totals = accumulate_gradients(run, logs)
        norm = clip(run, totals)
        applied = commit(run, totals, norm)
    run.tracker.progress.advance(progress.step)
    if applied and logs:
        log(run, totals, norm)
    if draws:
        draw_timeline(run)
    drop_gradients(run)  # now, so that an evaluation has their room
    run.stopping, still_writing, news = run.ranks.finish_agreement()
    look_for_larger_size(run, bool(news))
    if not still_writing:
        run.checkpointer.finish()


def look_for_larger_size(run: Run, news: bool) -> None:
    """After clean steps, try a size between what works and what failed; all ranks the same.

    news: whether any rank has some for the search.
    """
    micro, step, searching = run.state.micro, run.state.progress.step, not run.state.micro.settled
    run.phase = "search"
    for size in micro.succeeded(run.ranks, news).values():
        run.tracker.note(f"step {step + 1} tries a larger micro-batch: {size}")
    if searching and micro.settled:
        run.tracker.note(f"the search ended with micro-batch {micro.size} at step {step}")


def log(run: Run, totals: Totals, norm: Tensor) -> None:
    """The step's numbers. Waits for the device."""
    run.phase = "log"
    run.guard.check()
    progress, batches = run.state.progress, run.batches
    scalars = totals.means() | {
        "epoch": progress.samples / batches.epoch_samples,
        "lr": run.state.optimizer.param_groups[0]["lr"],
        "grad_norm": float(norm),
    }
    scalars |= run.meter.scalars(batches.accumulation(run.state.micro.size, run.accumulation))
    scalars |= spread(scalars, run.ranks)
    run.tracker.log(progress.step, progress.samples, scalars, run.objective[1])


def draw_timeline(run: Run) -> None:
    """The picture of this step's memory, by kind."""
    run.phase = "log"
    step, started = run.state.progress.step, time.monotonic()
    events, kinds = run.memory.events(run.meter.gradients())
    if events:
        path = run.tracker.run_dir / "memory_timeline.png"
        title = f"memory of step {step}, micro-batch {run.state.micro.size}"
        run.tracker.picture("memory_timeline", Picture(events, kinds, run.memory.budget, title, path), step)
    run.memory.keep_events = run.timeline = False
    run.meter.pause(time.monotonic() - started)


def save(run: Run) -> None:
    """A checkpoint of the present step."""
    started, progress = time.monotonic(), run.state.progress
    run.guard.check()
    run.phase = "save"
    run.strategy.broadcast_buffers()
    run.checkpointer.save(progress.step, run.config, sizes(run), is_best=progress.best_step == progress.step)
    run.meter.pause(time.monotonic() - started)


def sizes(run: Run) -> dict[str, Any]:
    """The sizes in a checkpoint: plain values, in samples and bytes. The run that resumes decides which it takes."""
    state = run.state
    return {
        "micro": state.micro.state_dict(),
        "eval_micro": state.eval_micro.state_dict(),
        "global": state.global_size,
        "budget": state.budget,
    }
