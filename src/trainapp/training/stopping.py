"""How the ranks of a run agree on stopping and saving, and what a signal would interrupt."""

import contextlib
import time
from collections.abc import Iterator

from trainapp.parallel.ranks import Flags
from trainapp.signals import AtWork, Stopped
from trainapp.training.phase import Phase
from trainapp.training.session import Session


def flags(session: Session) -> Flags:
    """Return the flags that this rank sends to the others once per step."""
    saver = session.checkpointer
    save_every = session.limits.save.seconds
    return Flags(
        stop_signal=session.stop.requested(),
        still_saving=saver.pending is not None and saver.busy,
        size_may_change=session.sizes.train.may_change,
        save_is_due=0 < save_every <= time.monotonic() - saver.clock,
        shape_is_unsteady=not session.sizes.train.shape_is_steady,
    )


def agreed_flags(session: Session) -> Flags:
    """Return the flags of all ranks, and act on a stop and on a save by the clock. Waits for the slowest rank."""
    of_all_ranks = session.ranks.finish_flag_exchange()
    session.stop.agreed = of_all_ranks.stop_signal
    session.checkpointer.is_due = of_all_ranks.save_is_due
    session.sizes.shape_is_steady = not of_all_ranks.shape_is_unsteady
    return of_all_ranks


def stop_requested(session: Session) -> int:
    """Return the number of a signal to this rank, or to another one that has announced it; 0 without one."""
    return session.ranks.announced(session.stop.requested())


def agree_on_stop(session: Session) -> None:
    """Raise Stopped on all ranks if a stop is requested on any.

    Collective, for work that each rank does alone and a signal cuts short: every rank comes here, whether it has
    finished its work or learned of the request.
    """
    _agree(session)
    if session.stop.agreed:
        raise Stopped


@contextlib.contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """Let a signal interrupt the block, a computation without collectives. Collective at its end: `agree_on_stop`."""
    with contextlib.suppress(Stopped):
        session.stop.interrupts = True
        try:
            yield
        finally:
            session.stop.interrupts = False
    agree_on_stop(session)


def accept_late_stop(session: Session) -> None:
    """Honour a signal that came during a save or a callback before the next step. Collective."""
    if not (session.is_finished or session.stop.agreed):
        _agree(session)


def _agree(session: Session) -> None:
    session.stop.agreed = session.ranks.agree(lambda: stop_requested(session))


def at_work(session: Session) -> AtWork:
    """Return what a signal would interrupt now; called from its handler and from the thread that hears it."""
    config = session.config
    name = _name_of_work(session)
    if not config.activity.trains:
        lost = "nothing" if config.continues else "the results so far"
        return AtWork(name, lost, is_saved=config.continues, may_end=config.mode == "lr_find")

    # What would be lost is what no checkpoint has.
    step = session.state.progress.step
    saver = session.checkpointer
    saved_at = saver.committed_at or 0
    # Of several ranks, one may have finished a step before another.
    is_single = session.ranks.world_size == 1 and not session.is_ending
    # A save that repeats that of this step replaces its checkpoint.
    is_saving = saver.pending is not None or session.engine.phase is Phase.SAVE
    return AtWork(
        name,
        lost=f"{step - saved_at} steps since step {saved_at}",
        is_saved=config.continues and saver.committed_at == step,
        may_end=is_single and not is_saving and saved_at == step,
    )


def _name_of_work(session: Session) -> str:
    if session.engine.phase is Phase.SAVE:
        return "checkpoint"
    if session.engine.phase is Phase.EVALUATE:
        activity = session.config.mode
        work = "evaluation" if activity == "train" else activity
        return f"micro-batch of {work}"
    return "step"
