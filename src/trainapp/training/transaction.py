"""A step is a transaction: until its commit, `rollback` leaves no trace of it."""

import contextlib
import time
from collections.abc import Iterator

from trainapp.checkpoint.train_state import Update
from trainapp.parallel.strategy import trained_alone
from trainapp.rng import seed_from
from trainapp.training import exactness
from trainapp.training.allocations import note_refused
from trainapp.training.micro_batches import watch_step
from trainapp.training.phase import Phase
from trainapp.training.session import Session, Step


@contextlib.contextmanager
def transaction(session: Session, step: Step) -> Iterator[None]:
    """Use around a step, up to and including its commit. An error passes through: the runner calls `rollback`.

    Seeds the global generators and records what else a forward may change (`Snapshot`). While the size is unvalidated,
    enables votes before each collective on whether any rank ran out of memory; also in the one in which cuDNN tunes
    itself. Watches memory, see `micro_batches`.
    """
    attempt, sizes = session.attempt, session.sizes
    attempt.phase, attempt.started, attempt.step = Phase.START, time.monotonic(), step  # no restore point yet
    attempt.micro_batches = 0
    sizes.train.follow_schedule(step.attempt)
    with alone(session, step.update):
        session.engine.begin(step)
        session.snapshot.take("all" if session.rehearsals else "written")
        seed(session, step)
        if sizes.train.is_unvalidated or step.is_logged:  # for swallowed errors; reading counters takes time
            note_refused(session)
        attempt.phase = Phase.DATA
        session.ranks.start_flag_exchange(session.flags)  # in the background: the step hides it
        tunes = session.autotuner.follow(sizes.train)
        session.ranks.enable_votes(tunes or sizes.train.is_unvalidated)
        with watch_step(session, step):
            check_exactness(session, step)
            yield


def seed(session: Session, step: Step) -> None:
    """Seed the global generators, from numbers that are the same in a retry and in a resumed run."""
    seed_from(session.state.device, session.state.seed, step.attempt, step.update.number, session.ranks.rank)


def alone(session: Session, update: Update) -> contextlib.AbstractContextManager[None]:
    """Where a step has several updates: inside, only the parameters of this one require gradients."""
    if len(session.state.updates) == 1:
        return contextlib.nullcontext()
    session.strategy.turn_to(update.number)
    return trained_alone(update.parameters, session.engine.parameters)


def check_exactness(session: Session, step: Step) -> None:
    """Rehearse the first steps, if `train.check_exactness` asks for it."""
    if session.rehearsals:

        def undo() -> None:
            rollback(session, Phase.GRADIENTS, other_ranks_wait=session.ranks.world > 1)
            seed(session, step)

        exactness.rehearse(session, step, undo)
        session.attempt.phase = Phase.DATA
        session.rehearsals -= 1
        if not session.rehearsals:
            session.tracker.note(
                f"check_exactness: the first {exactness.STEPS} steps are the same when they are retried"
            )


def rollback(session: Session, phase: Phase, other_ranks_wait: bool) -> None:
    """Return to where `phase` can be retried: to the start of the step, or to the end of the one before.

    Drops gradients and batches fetched ahead, and releases memory. After a commit the rest stays: evaluation restores
    itself what it had begun. Call outside `except`, whose traceback keeps tensors alive.
    other_ranks_wait: whether the ranks were in the step together; then all of them call this. Raises errors of the
    device that surface only here.
    """
    # Before anything is freed: emptying the cache unmaps expandable segments, and `record_stream` does not cover what
    # FSDP2 gathers on one stream and uses on another.
    session.memory.synchronize()
    session.batches.drop_fetched()
    if other_ranks_wait:
        session.strategy.abort_step()
    for update in session.state.updates:
        update.optimizer.zero_grad(set_to_none=True)
        update.precision.reset_scaler()
    session.memory.release()
    if phase.can_be_undone:
        session.snapshot.restore()
