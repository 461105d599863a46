"""The inner loop: what happens in each optimizer step, in order.

A step is a transaction: an attempt at it is committed, or rolled back without a trace. Its samples are fixed by the
sampler's state. Gradients are summed over micro-batches while parameters and optimizer stay unchanged, so aborting is
free; then one update changes everything. An out-of-memory error leaves `train`; the runner has the step rolled back
outside `except`, with a smaller micro-batch chosen, and calls `train` again. With several optimizers, each update of a
step is a transaction, on the same samples.
"""

import functools
from collections.abc import Iterator

from trainapp.data.batch import MicroBatch
from trainapp.sizes.record import next_size_text, sizes_text
from trainapp.training import callback_calls, exactness, reporting, stopping
from trainapp.training.attempt import attempt
from trainapp.training.dependence import compare_ranks, warn_of_dependence
from trainapp.training.engine import BatchContext, Engine, Totals, UpdateResult
from trainapp.training.evaluation.evaluate import evaluate
from trainapp.training.memory_watch import micro_batch_context, watched
from trainapp.training.phase import Phase, UpdateContext
from trainapp.training.session import Session


def train(session: Session) -> None:
    """Train until the run ends or all ranks agree to stop.

    Each iteration first finishes what the previous step left: weight average, callbacks, evaluation, saving. So a call
    after an error, or of a resumed run, continues there. An error leaves parameters and optimizer as they were after
    the last finished update, unless `session.engine.reported_phase.is_partly_applied`.
    """
    with session.engine.at(Phase.COMMITTED):
        while True:
            update_weight_average(session)
            callback_calls.after_step(session)
            if session.awaits_evaluation and not session.stop.agreed:  # after a stop, the same command evaluates
                evaluate(session)
            if session.save_is_due:
                save(session)
            if session.is_ending:
                return finish_saving(session)
            train_step(session)


def train_step(session: Session) -> None:
    """Make one optimizer step over the global batch; with several optimizers, one update of each in turn."""
    engine = session.engine
    for context in session.coming_updates():
        with attempt(session, context):  # until the commit, `rollback` leaves no trace of it
            if context.checks_exactness:
                exactness.require_same_twice(session, context, accumulate)
            samples = session.micro_batches()  # fetched, and split to the size that fits
            batches = engine.prepare(samples, functools.partial(watched, session, session.sizes.train))
            result = run_update(engine, batches, functools.partial(micro_batch_context, session))
            advance_progress(session, context, result)
        after_update(session, context, result)


def run_update(engine: Engine, batches: Iterator[MicroBatch], batch_context: BatchContext) -> UpdateResult:
    """Sum the gradients of these micro-batches and apply them: the work of an update, in training and in a plan."""
    totals = accumulate(engine, batches, batch_context)
    norm = engine.clip(totals)  # divided by the true count, clipped
    applied = engine.commit(totals, norm)  # optimizer.step()
    return UpdateResult(totals, norm, applied)


def accumulate(engine: Engine, batches: Iterator[MicroBatch], batch_context: BatchContext) -> Totals:
    """Sum the gradients of these micro-batches in `p.grad`. Return their totals; both are summed over all ranks.

    Args:
        engine: computes the gradients.
        batches: the micro-batches.
        batch_context: a context manager for forward and backward of each micro-batch.
    """
    for micro in batches:
        with batch_context(micro), engine.sample_draws(micro):  # gradient sync, memory tracking; draws by sample
            loss = engine.forward(micro)
            engine.backward(loss, micro)  # gradients accumulate
            del loss  # not kept during the next forward
    return engine.reduce()  # over all ranks


def advance_progress(session: Session, context: UpdateContext, result: UpdateResult) -> None:
    """Advance progress after an update was applied or skipped."""
    progress = session.state.progress
    step_is_complete = progress.finish_update(result.applied, session.state.cadences)
    if step_is_complete:
        session.meter.count(context.samples, result.totals.count)
        session.batches.advance(progress)
    session.engine.finish_update()


def after_update(session: Session, context: UpdateContext, result: UpdateResult) -> None:
    """Log, free the gradients, exchange flags with the other ranks, and act on them."""
    if context.is_logged:
        reporting.log(session, context, result)
    if context.plots_memory:
        reporting.draw_timeline(session)
    if not result.applied and result.totals.count == 0:
        reporting.warn_nothing_counts(session, context)

    # The update is over: free its gradients, and let the ranks agree on what comes next.
    session.engine.drop_gradients()
    session.tracker.progress.advance(session.state.progress.step)
    flags = stopping.agreed_flags(session)
    grow_micro_batch(session, context, flags.size_may_change)
    if session.checkpointer.pending is not None and not flags.still_saving:
        finish_saving(session)


def grow_micro_batch(session: Session, context: UpdateContext, size_may_change: bool) -> None:
    """Try a larger size after clean steps, or a smaller one where memory is too tight, equal on all ranks.

    Args:
        context: the finished update.
        size_may_change: whether any rank has seen a shape whose size is unvalidated or may grow.
    """
    sizes = session.sizes.train
    may_change = sizes.is_unvalidated or size_may_change
    was_searching = may_change and not sizes.search_has_ended
    next_sizes = sizes.record_success(session.ranks, size_may_change)
    for bucket in () if session.is_ending else next_sizes:
        session.tracker.note(f"step {context.step_number + 1} {next_size_text(sizes, bucket)}")
    if may_change and sizes.schedule.record(context.batch_number):
        warn_of_dependence(session, context)
    if was_searching and sizes.search_has_ended:
        text = f"the search ended at step {context.step_number} with micro-batch {sizes_text(sizes)}"
        session.tracker.note(text)


def update_weight_average(session: Session) -> None:
    """Update the weight average. It runs between steps, so a retry resumes the update instead of repeating it."""
    if session.state.average.averages:
        with session.engine.at(Phase.WEIGHT_AVERAGE):
            session.state.average.catch_up(session.state.progress.step)


def save(session: Session) -> None:
    """Save a checkpoint of the current step."""
    with session.engine.at(Phase.SAVE):
        progress = session.state.progress
        session.engine.nonfinite.check()
        compare_ranks(session)
        session.strategy.broadcast_buffers(except_for=session.state.sample_rows.names)
        is_best = progress.best_step == progress.step
        with session.meter.pause():
            session.checkpointer.save(progress.step, session.config.to_dict(), session.resume_facts(), is_best)
        stopping.accept_late_stop(session)


def finish_saving(session: Session) -> None:
    """Commit the checkpoint written in the background, if any."""
    with session.engine.at(Phase.SAVE):
        session.checkpointer.finish()
