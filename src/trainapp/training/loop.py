"""The inner loop: what happens in each optimizer step, in order.

A step is a transaction. Its samples are fixed by the sampler's state. Gradients are summed over micro-batches while
parameters and optimizer stay unchanged, so aborting is free; then one update changes everything. An
out-of-memory error leaves `train`; the runner rolls the step back outside `except`, chooses a smaller micro-batch, and
calls `train` again. With several optimizers, a step is a transaction for each, on the same samples.
"""

import functools
from collections.abc import Iterator

from torch import Tensor

from trainapp.data.batch import MicroBatch
from trainapp.sizes.record import shape_suffix, sizes_text
from trainapp.training import events, exactness
from trainapp.training.engine import Around, Engine, Totals
from trainapp.training.evaluate import evaluate
from trainapp.training.phase import PARTIAL, Phase, Step
from trainapp.training.session import Session
from trainapp.training.transaction import around, micro_batches, transaction


def train(session: Session) -> None:
    """Train until the run ends or all ranks agree to stop. An error leaves parameters and optimizer as they were after
    the last finished update, unless `session.engine.phase.is_partial`. What follows a step comes first, so that a call
    after an error, or of a resumed run, completes it before the next step.
    """
    while True:
        update_weight_average(session)
        events.after_step(session)
        if session.awaits_evaluation and not session.stop.agreed:  # after a stop, the same command does
            evaluate(session)
        if session.save_is_due:
            save(session)
        if session.is_ending:
            return finish_saving(session)
        train_step(session)


def train_step(session: Session) -> None:
    """One optimizer step over the global batch; with several optimizers, one update of each in turn."""
    engine, within = session.engine, functools.partial(around, session)
    for step in session.coming_updates():
        with transaction(session, step):  # until the commit, `rollback` leaves no trace of the step
            if step.is_rehearsed:
                exactness.rehearse(session, step, accumulate)
            totals = accumulate(engine, micro_batches(session), within)  # the samples, cut to the size that fits
            norm = engine.clip(totals)  # divided by the true count, clipped
            applied = engine.commit(totals, norm)  # optimizer.step()
            count(session, step, totals, applied)
        after_update(session, step, totals, norm, applied)


def accumulate(engine: Engine, batches: Iterator[MicroBatch], within: Around) -> Totals:
    """The gradients of these micro-batches in `p.grad`, and their totals, both summed over all ranks.

    within: a context manager around forward and backward of each micro-batch.
    """
    totals = Totals()
    for micro in batches:
        with within(micro), engine.drawing(micro):  # gradient sync, memory tracking; random numbers by sample
            loss, totals = engine.forward(micro, totals)
            engine.backward(loss, micro)  # gradients accumulate
            del loss  # not kept during the next forward
        if engine.phase not in PARTIAL:  # a backward that updates stays so until the commit
            engine.phase = Phase.DATA
    return engine.reduce(totals)  # over all ranks


def count(session: Session, step: Step, totals: Totals, applied: bool) -> None:
    """Advance progress after an update was applied or skipped."""
    progress = session.state.progress
    if progress.finish_update(applied, session.state.every):
        session.meter.count(step.samples, totals.count)
        session.batches.advance(progress)
    session.engine.phase = Phase.COMMITTED


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
    flags = session.agreed_flags()
    grow_micro_batch(session, step, flags.search_news)
    if session.checkpointer.pending is not None and not flags.still_saving:
        finish_saving(session)


def grow_micro_batch(session: Session, step: Step, news: bool) -> None:
    """After clean steps, try a larger size, equal on all ranks.

    news: whether any rank has seen a shape whose size is unvalidated or may grow.
    """
    sizes = session.sizes.train
    may_change = sizes.is_unvalidated or news
    was_searching = may_change and not sizes.search_has_ended
    for bucket, size in sizes.succeeded(session.ranks, news).items():
        session.tracker.note(f"step {step.number + 1} tries a larger micro-batch: {size}{shape_suffix(sizes, bucket)}")
    if may_change and sizes.record(step.attempt):
        events.note_dependence(session, step)
    if was_searching and sizes.search_has_ended:
        session.tracker.note(f"the search ended at step {step.number} with micro-batch {sizes_text(sizes)}")


def update_weight_average(session: Session) -> None:
    """Update the weight average. Runs between steps, so a retry resumes the update instead of repeating it."""
    session.engine.phase = Phase.WEIGHT_AVERAGE
    if session.state.average.averages:
        session.state.average.catch_up(session.state.progress.step)


def save(session: Session) -> None:
    """Save a checkpoint of the current step."""
    session.engine.phase = Phase.SAVE
    progress = session.state.progress
    session.engine.nonfinite.check()
    session.strategy.broadcast_buffers()
    facts = {"budget": session.memory.budget, "draws": session.engine.ledger.state_dict()}
    facts |= session.sizes.state_dict() | {"seconds": session.meter.seconds}
    is_best = progress.best_step == progress.step
    with session.meter.pause():
        session.checkpointer.save(progress.step, session.config.to_dict(), facts, is_best)
    session.note_stop()


def finish_saving(session: Session) -> None:
    """Commit the checkpoint written in the background, if any."""
    session.engine.phase = Phase.SAVE
    session.checkpointer.finish()
