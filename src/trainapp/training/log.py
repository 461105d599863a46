"""What a step logs: its metrics, and a picture of its memory."""

import time

from torch import Tensor

from trainapp.memory.timeline import Picture
from trainapp.optim.schedules import rates
from trainapp.tracking.meter import spread_over_ranks
from trainapp.training.engine import Totals
from trainapp.training.session import Phase, Session, Step


def log(session: Session, step: Step, totals: Totals, norm: Tensor, applied: bool) -> None:
    """Note the update's metrics, and write those of the step after its last one. Waits for the device."""
    session.attempt.phase = Phase.LOG
    progress, batches = session.state.progress, session.batches
    if applied:
        session.engine.nonfinite.check()
        own = totals.means(session.ranks) | rates(step.update.optimizer) | {"grad_norm": float(norm)}
        session.attempt.logged |= {step.update.named(name): value for name, value in own.items()} | {
            "loss": own["loss"]
        }
    if progress.update or not session.attempt.logged:
        return
    scalars = session.attempt.logged | {"epoch": batches.epochs(progress)}
    scalars |= session.sizes.scalars(batches) | session.meter.scalars()
    scalars |= spread_over_ranks(scalars, session.ranks)
    session.tracker.log(progress.step, progress.samples, scalars, session.objective.metric)


def draw_timeline(session: Session) -> None:
    """Queue a plot of this step's memory, by kind; on CUDA, write the allocator's snapshot instead."""
    session.attempt.phase = Phase.LOG
    step, started = session.state.progress.step, time.monotonic()
    events, kinds = session.memory.events(session.engine.gradients())
    path = session.tracker.run_dir / "memory_timeline.png"
    try:
        session.memory.dump(path.with_suffix(".snapshot.pickle"))
    except OSError as error:  # the run matters more than its record
        session.tracker.unwritable(path.parent, error)
    session.memory.forget_record()
    if events:
        title = f"memory of step {step}, micro-batch {session.sizes.train.size}"
        session.tracker.picture("memory_timeline", Picture(events, kinds, session.memory.budget, title, path), step)
    session.memory.keep_events = False
    session.meter.pause(time.monotonic() - started)
