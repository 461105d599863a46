"""What a step reports once it is committed: its scalars, a plot of its memory, warnings."""

from collections.abc import Mapping

from trainapp.memory.picture import Picture
from trainapp.optim.schedules import rates
from trainapp.tracking.meter import spread_over_ranks
from trainapp.training.dependence import warn_of_dependence
from trainapp.training.engine import UpdateResult
from trainapp.training.phase import UpdateContext
from trainapp.training.session import Session


def log(session: Session, context: UpdateContext, result: UpdateResult) -> None:
    """Collect this update's metrics; write them after the step's last update. Waits for the device."""
    progress = session.state.progress
    batches = session.batches

    # Metrics of the update: those of a skipped one mean nothing.
    if result.applied:
        session.engine.nonfinite.check()
        metrics = result.totals.means(session.ranks)
        metrics |= rates(context.update.optimizer)
        metrics["grad_norm"] = float(result.norm)
        for name, value in metrics.items():
            session.step_metrics[context.update.named(name)] = value
        session.step_metrics["loss"] = metrics["loss"]  # of a step's last update
    if progress.update or not session.step_metrics:
        return

    # After the step's last update, add what is measured once per step.
    size = session.sizes.train.size
    scalars = session.step_metrics | {
        "epoch": batches.epochs(progress),
        "batch/global_size": batches.global_size,
        "batch/micro_size": size,
        "batch/accumulation": batches.accumulation(size),
        "batch/eval_micro_size": session.sizes.evaluation.size,
    }
    scalars |= session.meter.scalars()
    scalars |= spread_over_ranks(scalars, session.ranks)
    session.tracker.log_step(progress.step, progress.samples, scalars, session.objective.metric)
    warn_of_dependence(session, context)  # what has been noticed since
    _warn_of_slowdown(session, scalars)


def _warn_of_slowdown(session: Session, scalars: Mapping[str, float]) -> None:
    """Warn once that steps take several times as long as before, on a device whose memory others may have taken."""
    slowdown = session.meter.slowdown.text(
        scalars["samples_per_second"], scalars["data_wait"], session.sizes.recoveries
    )
    if not slowdown:
        return
    others = session.memory.others_text()
    if others:
        step = session.state.progress.step
        session.tracker.warn_once(f"step {step}: {slowdown}; {others}", topic="slowdown")


def warn_nothing_counts(session: Session, context: UpdateContext) -> None:
    """Warn, once, that the loss counts nothing over a whole step."""
    session.tracker.warn_once(
        f"step {context.step_number}: the loss's count is 0 over the whole step, so there is no update; such steps "
        "count as skipped, and their samples as trained",
        topic="nothing counts",
    )


def warn_of_unknown_epochs(session: Session) -> None:
    """Warn of intervals in epochs of a stream that may be endless, which never completes one. Call before the first
    step.
    """
    config = session.config

    # Intervals in epochs that the run would use.
    intervals = {}
    if session.eval_sets and session.limits.evaluate.epochs:
        intervals["every.eval"] = config.every.eval
    if session.checkpointer.directory is not None and session.limits.save.epochs:
        intervals["every.save"] = config.every.save
    is_known_to_end = session.state.progress.epoch > 0 or hasattr(session.batches.dataset, "__len__")
    if not config.activity.trains or not intervals or is_known_to_end:
        return

    settings = ", ".join(f"{name}={value}" for name, value in intervals.items())
    session.tracker.warn_once(
        f"{settings}: data={config.data.target} is a stream without `__len__`, so the length of an epoch is not known "
        f"before the first one ends. If the stream ends within train.max_steps={config.train.max_steps}, ignore this, "
        "or give it `__len__`; if it is longer or endless, this is due only at the run's end: set "
        f"{' and '.join(intervals)} in steps, samples or percent, such as '10 percent'",
        topic="epochs of a stream",
    )


def draw_timeline(session: Session) -> None:
    """Queue a plot of this step's memory, by category; on CUDA, write the allocator's snapshot instead."""
    step = session.state.progress.step
    path = session.tracker.run_dir / "memory_timeline.png"
    with session.meter.pause():
        events, kinds = session.memory.events(session.engine.gradients())
        try:
            session.memory.dump(path.with_suffix(".snapshot.pickle"))
        except OSError as error:  # the run is more important than its record
            session.tracker.warn_unwritable(path.parent, error)
    if events:
        title = f"memory of step {step}, micro-batch {session.sizes.train.size}"
        picture = Picture(events, kinds, session.memory.budget, title, path)
        session.tracker.queue_picture("memory_timeline", picture, step)
    session.memory.keep_events = False
