"""An attempt at a step: how it begins and, unless it is committed, how it is rolled back without a trace."""

import contextlib
import functools
import time
from collections.abc import Iterator

from trainapp.training import stopping
from trainapp.training.memory_watch import begin_counting_refused, watch_step
from trainapp.training.phase import Phase, UpdateContext
from trainapp.training.session import Session


@contextlib.contextmanager
def attempt(session: Session, context: UpdateContext) -> Iterator[None]:
    """Begin an attempt at a step; the block makes and commits it. An error passes through: the runner calls `rollback`.

    Seeds the global generators and records everything else a forward may change (`Snapshot`). While the size is
    unvalidated, enables votes before each collective on whether any rank ran out of memory; also in the step in which
    cuDNN autotunes.
    """
    sizes = session.sizes.train
    engine = session.engine

    session.attempt.started = time.monotonic()
    sizes.apply_schedule(context.batch_number)
    with contextlib.ExitStack() as stack:
        with engine.at(Phase.START):  # no restore point yet
            stack.enter_context(engine.train_only(context.update))
            engine.begin(context)
            session.snapshot.begin_step("all" if context.checks_exactness else "written")
            engine.seed(context)
            if sizes.is_unvalidated or context.is_logged:  # for swallowed errors; reading counters takes time
                begin_counting_refused(session)
        with engine.at(Phase.DATA):
            session.ranks.start_flag_exchange(functools.partial(stopping.flags, session))  # overlaps with the step
            autotuner = session.sizes.autotuner
            tunes = autotuner is not None and autotuner.follow(sizes, session.sizes.shape_is_steady)
            session.ranks.enable_votes(tunes or sizes.is_unvalidated)
            stack.enter_context(watch_step(session, context))
            yield
        # What the stack leaves comes after the commit: an error there must not undo it.


def rollback(session: Session, phase: Phase, other_ranks_wait: bool) -> None:
    """Return to a state from which `phase` can be retried: the start of the step, or the end of the previous one.

    Drops gradients and prefetched batches, and releases memory. After a commit nothing else is restored; evaluation
    resumes by itself. Call outside `except`, whose traceback keeps tensors alive. Raises errors of the device that
    surface only here.

    Args:
        phase: the one that failed.
        other_ranks_wait: whether the ranks were in the step together; then all of them call this.
    """
    # Before anything is freed: emptying the cache unmaps expandable segments, and `record_stream` does not cover
    # tensors that FSDP2 gathers on one stream and uses on another.
    session.memory.synchronize()
    session.batches.drop_fetched()

    # Drop what the attempt has computed.
    if other_ranks_wait:
        session.strategy.abort_step()
    for update in session.state.updates:
        update.optimizer.zero_grad(set_to_none=True)
        update.precision.reset_scaler()
    session.engine.forget_update()  # where it was partly applied, the caller returns to a checkpoint
    session.memory.release()

    # Restore what its forwards have written.
    if phase.can_be_undone:
        session.snapshot.restore()
