"""The inner loop: what happens in each optimizer step, in order.

A step is a transaction. Its samples are fixed by the sampler's state. Gradients are summed over micro-batches while
parameters and optimizer stay unchanged, so that aborting is free; then one update changes everything. An
out-of-memory error leaves `train`; the runner rolls the step back outside `except`, chooses a smaller micro-batch, and
calls `train` again. With several optimizers, a step is a transaction for each, on the same samples.
"""

import time

from torch import Tensor

from trainapp.models.inspect import has_batchnorm, instead_of_batchnorm
from trainapp.sizes.record import shape_of, shown
from trainapp.training import callbacks
from trainapp.training.evaluate import evaluate
from trainapp.training.log import draw_timeline, log
from trainapp.training.micro_batches import around, micro_batches
from trainapp.training.phase import Phase
from trainapp.training.run import Run, Step
from trainapp.training.totals import Totals
from trainapp.training.transaction import transaction


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
    """One optimizer step over the global batch; with several optimizers, each in its turn. Nothing changes before
    `commit`.
    """
    engine = run.engine
    for step in run.coming_updates():
        with transaction(run, step):  # until the commit, `rollback` leaves no trace of the step
            totals = Totals()
            for micro in micro_batches(run):  # the step's samples, cut to the size that fits
                with around(run, micro):  # ranks, watched memory
                    loss, totals = engine.forward(micro, totals)
                    engine.backward(loss, micro)  # gradients add up
            totals = engine.reduce(totals)  # over all ranks
            norm = engine.clip(totals)  # divided by the true count, clipped
            applied = engine.commit(totals, norm)  # optimizer.step()
            count(run, step, totals, applied)
        after_update(run, step, totals, norm, applied)


def count(run: Run, step: Step, totals: Totals, applied: bool) -> None:
    """The update is committed, or left out: what follows is the next one's, or the next step's."""
    progress = run.state.progress
    if progress.finish_update(applied, run.state.every):
        run.meter.count(step.samples, totals.count)
        run.batches.advance(progress)
    run.attempt.phase = Phase.COMMITTED


def after_update(run: Run, step: Step, totals: Totals, norm: Tensor, applied: bool) -> None:
    """Log, free the gradients, exchange flags with the other ranks, and act on them."""
    if step.is_logged:
        log(run, step, totals, norm, applied)
    if step.is_drawn:
        draw_timeline(run)
    if not applied and totals.count == 0:
        run.tracker.warn_once(
            f"step {step.number}: the loss's count is 0 over the whole step, so there is no update; such steps "
            "count as skipped, and their samples as trained",
            topic="nothing counts",
        )
    run.engine.drop_gradients()
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


def note_batchnorm(run: Run, step: Step) -> None:
    """Note once that BatchNorm depends on the micro-batch."""
    size = max(run.sizes.train.in_force.values(), default=run.sizes.train.size)
    if run.batches.accumulation(size, run.sizes.parts) > 1 and has_batchnorm(run.state.model):
        run.tracker.warn_once(
            f"step {step.number}: the model has BatchNorm, whose statistics are those of the micro-batch ({size}), not "
            f"of the global batch; {instead_of_batchnorm(run.config.model)} does not depend on it",
            topic="batchnorm",
        )


def update_weight_average(run: Run) -> None:
    """Runs between steps, so that a retry resumes the update instead of repeating it."""
    run.attempt.phase = Phase.WEIGHT_AVERAGE
    run.state.average.catch_up(run.state.progress.step)


def save(run: Run) -> None:
    """Save a checkpoint of the current step."""
    run.attempt.phase = Phase.SAVE
    started, progress = time.monotonic(), run.state.progress
    run.engine.nonfinite.check()
    run.strategy.broadcast_buffers()
    sizes = run.sizes.state_dict() | {"global": run.state.global_size, "budget": run.memory.budget}
    is_best = progress.best_step == progress.step
    run.checkpointer.save(progress.step, run.config.to_dict(), sizes, is_best)
    run.meter.pause(time.monotonic() - started)


def finish_saving(run: Run) -> None:
    """Commit the checkpoint that was written in the background, if any."""
    run.attempt.phase = Phase.SAVE
    run.checkpointer.finish()
