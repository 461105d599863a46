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
from trainapp.training.run import Run, Step


@contextlib.contextmanager
def transaction(run: Run, step: Step) -> Iterator[None]:
    """Use around a step, up to and including its commit. An error passes through: the runner calls `rollback`.

    Seeds the global generators and records what else a forward may change (`Snapshot`). While the size is unproven,
    enables votes before each collective on whether any rank ran out of memory; also in the one in which cuDNN tunes
    itself. Watches memory, see `micro_batches`.
    """
    attempt, sizes = run.attempt, run.sizes
    attempt.phase, attempt.started, attempt.step = Phase.START, time.monotonic(), step  # no restore point yet
    attempt.micro_batches = 0
    sizes.follow_schedule(step.attempt)
    with alone(run, step.update):
        run.engine.begin(step)
        run.snapshot.take("all" if run.rehearsals else "written")
        seed(run, step)
        if sizes.train.is_unproven or step.is_logged:  # for ambiguous and swallowed errors; reading counters takes time
            note_refused(run)
        attempt.phase = Phase.DATA
        run.ranks.start_flag_exchange(run.flags)  # in the background: the step hides it
        tunes = run.autotuner.follow(sizes.train)
        run.ranks.enable_votes(tunes or sizes.train.is_unproven)
        with watch_step(run, step):
            check_exactness(run, step)
            yield


def seed(run: Run, step: Step) -> None:
    """Seed the global generators, from numbers that are the same in a retry and in a resumed run."""
    seed_from(run.state.device, run.state.seed, step.attempt, step.update.number, run.ranks.rank)


def alone(run: Run, update: Update) -> contextlib.AbstractContextManager[None]:
    """Where a step has several updates: inside, only the parameters of this one require gradients."""
    if len(run.state.updates) == 1:
        return contextlib.nullcontext()
    run.strategy.turn_to(update.number)
    return trained_alone(update.parameters, run.engine.parameters)


def check_exactness(run: Run, step: Step) -> None:
    """Rehearse the first steps, if `train.check_exactness` asks for it."""
    if run.rehearsals:

        def undo() -> None:
            rollback(run, Phase.GRADIENTS, other_ranks_wait=run.ranks.world > 1)
            seed(run, step)

        exactness.rehearse(run, step, undo)
        run.attempt.phase = Phase.DATA
        run.rehearsals -= 1
        if not run.rehearsals:
            run.tracker.note(f"check_exactness: the first {exactness.STEPS} steps are the same when they are retried")


def rollback(run: Run, phase: Phase, other_ranks_wait: bool) -> None:
    """Return to where `phase` can be retried: to the start of the step, or to the end of the one before.

    Drops gradients and batches fetched ahead, and releases memory. After a commit the rest stays: evaluation restores
    itself what it had begun. Call outside `except`, whose traceback keeps tensors alive.
    other_ranks_wait: whether the ranks were in the step together; then all of them call this. Raises errors of the
    device that surface only here.
    """
    # Before anything is freed: emptying the cache unmaps expandable segments, and `record_stream` does not cover what
    # FSDP2 gathers on one stream and uses on another.
    run.memory.synchronize()
    run.batches.drop_fetched()
    if other_ranks_wait:
        run.strategy.abort_step()
    for update in run.state.updates:
        update.optimizer.zero_grad(set_to_none=True)
        update.precision.reset_scaler()
    run.memory.release()
    if phase.can_be_undone:
        run.snapshot.restore()
