"""The inner loop: what happens in each optimizer step, in order.

A step is a transaction. Its samples are fixed by the sampler's state. Gradients are summed over micro-batches while
parameters and optimizer stay unchanged, so aborting is free; then one update changes everything. An
out-of-memory error leaves `train`; the runner rolls the step back outside `except`, chooses a smaller micro-batch, and
calls `train` again. With several optimizers, a step is a transaction for each, on the same samples.
"""

import time

from torch import Tensor

from trainapp.models.inspect import has_batchnorm, instead_of_batchnorm
from trainapp.sizes.record import shape_of, shown
from trainapp.training import events
from trainapp.training.engine import Totals
from trainapp.training.evaluate import evaluate
from trainapp.training.phase import Phase, Step
from trainapp.training.session import Session
from trainapp.training.transaction import around, micro_batches, transaction


def train(session: Session) -> None:
    """Train until the run ends or all ranks agree to stop. An error leaves parameters and optimizer as they were after
    the last finished step, unless `session.attempt.phase.is_partial`.
    """
    while True:
        update_weight_average(session)
        events.after_step(session)
        if session.evaluation_is_due:
            evaluate(session)
        if session.save_is_due:
            save(session)
        if session.is_ending:
            return finish_saving(session)
        train_step(session)


def train_step(session: Session) -> None:
    """One optimizer step over the global batch; with several optimizers, one update of each in turn. Nothing changes
    before `commit`.
    """
    engine = session.engine
    for step in session.coming_updates():
        with transaction(session, step):  # until the commit, `rollback` leaves no trace of the step
            totals = Totals()
            for micro in micro_batches(session):  # the step's samples, cut to the size that fits
                with around(session, micro):  # ranks, watched memory
                    loss, totals = engine.forward(micro, totals)
                    engine.backward(loss, micro)  # gradients add up
            totals = engine.reduce(totals)  # over all ranks
            norm = engine.clip(totals)  # divided by the true count, clipped
            applied = engine.commit(totals, norm)  # optimizer.step()
            count(session, step, totals, applied)
        after_update(session, step, totals, norm, applied)


def count(session: Session, step: Step, totals: Totals, applied: bool) -> None:
    """Advance progress after an update was applied or skipped."""
    progress = session.state.progress
    if progress.finish_update(applied, session.state.every):
        session.meter.count(step.samples, totals.count)
        session.batches.advance(progress)
    session.attempt.phase = Phase.COMMITTED


def after_update(session: Session, step: Step, totals: Totals, norm: Tensor, applied: bool) -> None:
    """Log, free the gradients, exchange flags with the other ranks, and act on them."""
    if step.is_logged:
        events.log(session, step, totals, norm, applied)
    if step.is_drawn:
        events.draw_timeline(session)
    if not applied and totals.count == 0:
        session.tracker.warn_once(
            f"step {step.number}: the loss's count is 0 over the whole step, so there is no update; such steps "
            "count as skipped, and their samples as trained",
            topic="nothing counts",
        )
    session.engine.drop_gradients()
    session.tracker.progress.advance(session.state.progress.step)
    flags = session.ranks.finish_flag_exchange()
    session.stop.agreed = flags.stop_signal
    grow_micro_batch(session, step, flags.search_news)
    if session.checkpointer.pending is not None and not flags.still_saving:
        finish_saving(session)


def grow_micro_batch(session: Session, step: Step, news: bool) -> None:
    """After clean steps, try a larger size, equal on all ranks.

    news: whether any rank has seen a shape whose size is unvalidated or may grow.
    """
    sizes = session.sizes.train
    was_searching = not sizes.search_has_ended
    session.attempt.phase = Phase.SEARCH
    for bucket, size in sizes.succeeded(session.ranks, news).items():
        session.tracker.note(f"step {step.number + 1} tries a larger micro-batch: {size}{shape_of(sizes, bucket)}")
    if sizes.record(step.attempt):
        note_batchnorm(session, step)
    if was_searching and sizes.search_has_ended:
        session.tracker.note(f"the search ended at step {step.number} with micro-batch {shown(sizes)}")


def note_batchnorm(session: Session, step: Step) -> None:
    """Note once that BatchNorm depends on the micro-batch."""
    size = max(session.sizes.train.in_force.values(), default=session.sizes.train.size)
    if session.batches.accumulation(size) > 1 and has_batchnorm(session.state.model):
        session.tracker.warn_once(
            f"step {step.number}: the model has BatchNorm, whose statistics are those of the micro-batch ({size}), not "
            f"of the global batch; {instead_of_batchnorm(session.config.model)} does not depend on it",
            topic="batchnorm",
        )


def update_weight_average(session: Session) -> None:
    """Update the weight average. Runs between steps, so a retry resumes the update instead of repeating it."""
    session.attempt.phase = Phase.WEIGHT_AVERAGE
    if session.state.average.averages:
        session.state.average.catch_up(session.state.progress.step)


def save(session: Session) -> None:
    """Save a checkpoint of the current step."""
    session.attempt.phase = Phase.SAVE
    started, progress = time.monotonic(), session.state.progress
    session.engine.nonfinite.check()
    session.strategy.broadcast_buffers()
    sizes = session.sizes.state_dict() | {"budget": session.memory.budget}
    is_best = progress.best_step == progress.step
    session.checkpointer.save(progress.step, session.config.to_dict(), sizes, is_best)
    session.meter.pause(time.monotonic() - started)


def finish_saving(session: Session) -> None:
    """Commit the checkpoint written in the background, if any."""
    session.attempt.phase = Phase.SAVE
    session.checkpointer.finish()
