"""The inner loop: what happens in each optimizer step, in order.

A step is a transaction. Its samples are fixed by the sampler's state. Gradients are summed over micro-batches while
parameters and optimizer stay unchanged, so that aborting is free; then one update changes everything. An
out-of-memory error leaves `train`; the runner rolls the step back outside `except`, chooses a smaller micro-batch, and
calls `train` again. With several optimizers, a step is a transaction for each, on the same samples.
"""

import time

from torch import Tensor

from trainapp.memory.timeline import Picture
from trainapp.optim.schedules import rates
from trainapp.sizes.record import shape_of, shown
from trainapp.tracking.meter import spread_over_ranks
from trainapp.train import callbacks
from trainapp.train.evaluate import evaluate
from trainapp.train.in_backward import update_in_backward
from trainapp.train.phase import Phase
from trainapp.train.run import Run, Step
from trainapp.train.step import accumulate_gradients, clip_gradients, drop_gradients, note_batchnorm, update
from trainapp.train.totals import Totals
from trainapp.train.transaction import transaction


def train(run: Run) -> None:
    """Steps until the end of the run or an agreed stop. An error leaves parameters and optimizer as they were after
    the last finished step, unless `run.attempt.phase.is_torn`.
    """
    while True:
        update_weight_average(run)
        callbacks.after_step(run)
        if run.evaluation_is_due:
            evaluate(run)
        if run.save_is_due:
            save(run)
        if run.is_ending:
            return finish_saving(run)
        train_step(run)


def train_step(run: Run) -> None:
    """One optimizer step over the global batch: one update or, with several optimizers, each that is not yet made."""
    for step in run.coming_updates():
        train_update(run, step)


def train_update(run: Run, step: Step) -> None:
    """One update. Nothing changes before it."""
    with transaction(run, step):  # saves what `rollback` restores; an error passes through
        if run.config.optimizer.in_backward:
            totals, norm, applied = update_in_backward(run, step)
        else:
            totals = accumulate_gradients(run, step)
            norm = clip_gradients(run, step, totals)
            applied = update(run, step, totals, norm)
    if step.is_logged:
        log(run, step, totals, norm, applied)
    if step.is_drawn:
        draw_timeline(run)
    finish_step(run, step)


def finish_step(run: Run, step: Step) -> None:
    """Free the gradients, exchange flags with the other ranks, and act on them."""
    drop_gradients(run)
    run.tracker.progress.advance(run.state.progress.step)
    flags = run.ranks.finish_flag_exchange()
    run.stop.agreed = flags.stop_signal
    grow_micro_batch(run, step, flags.search_news)
    if not flags.still_saving:
        finish_saving(run)


def grow_micro_batch(run: Run, step: Step, news: bool) -> None:
    """After clean steps, try a larger size, equal on all ranks.

    news: whether any rank has seen a shape whose size is unproven or may grow.
    """
    sizes = run.sizes.train
    was_searching = not sizes.search_has_ended
    run.attempt.phase = Phase.SEARCH
    for bucket, size in sizes.succeeded(run.ranks, news).items():
        run.tracker.note(f"step {step.number + 1} tries a larger micro-batch: {size}{shape_of(sizes, bucket)}")
    if run.sizes.record(step.attempt):
        note_batchnorm(run, step)
    if was_searching and sizes.search_has_ended:
        run.tracker.note(f"the search ended at step {step.number} with micro-batch {shown(sizes)}")


def update_weight_average(run: Run) -> None:
    """Runs between steps, so that a retry resumes the update instead of repeating it."""
    run.attempt.phase = Phase.WEIGHT_AVERAGE
    run.state.average.catch_up(run.state.progress.step)


def log(run: Run, step: Step, totals: Totals, norm: Tensor, applied: bool) -> None:
    """Note the update's metrics, and write those of the step after its last one. Waits for the device."""
    run.attempt.phase = Phase.LOG
    progress, batches = run.state.progress, run.batches
    if applied:
        run.nonfinite.check()
        own = totals.means(run.ranks) | rates(step.update.optimizer) | {"grad_norm": float(norm)}
        run.logged |= {step.update.named(name): value for name, value in own.items()} | {"loss": own["loss"]}
    if progress.update or not run.logged:
        return
    scalars = run.logged | {"epoch": batches.epochs(progress)}
    scalars |= run.sizes.scalars(batches) | run.meter.scalars()
    scalars |= run.utilisation.scalars(scalars["samples_per_second"], run.ranks.world)
    scalars |= spread_over_ranks(scalars, run.ranks)
    run.tracker.log(progress.step, progress.samples, scalars, run.objective.metric)


def draw_timeline(run: Run) -> None:
    """Queue a plot of this step's memory, by kind."""
    run.attempt.phase = Phase.LOG
    step, started = run.state.progress.step, time.monotonic()
    events, kinds = run.memory.events(run.meter.gradients())
    run.memory.forget_record()
    if events:
        path = run.tracker.run_dir / "memory_timeline.png"
        title = f"memory of step {step}, micro-batch {run.sizes.train.size}"
        run.tracker.picture("memory_timeline", Picture(events, kinds, run.memory.budget, title, path), step)
    run.memory.keep_events = False
    run.meter.pause(time.monotonic() - started)


def save(run: Run) -> None:
    """Save a checkpoint of the current step."""
    run.attempt.phase = Phase.SAVE
    started, progress = time.monotonic(), run.state.progress
    run.nonfinite.check()
    run.strategy.broadcast_buffers()
    sizes = run.sizes.state_dict() | {"global": run.state.global_size, "budget": run.memory.budget}
    is_best = progress.best_step == progress.step
    run.checkpointer.save(progress.step, run.config.to_dict(), sizes, is_best)
    run.meter.pause(time.monotonic() - started)


def finish_saving(run: Run) -> None:
    """Commit the checkpoint that was written in the background, if any."""
    run.attempt.phase = Phase.SAVE
    run.checkpointer.finish()
