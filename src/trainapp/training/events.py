"""Events after a step or an evaluation, which can no longer be rolled back: logging, a plot of the step's memory, and
callbacks.

An error in a callback ends the run after its step is saved; all ranks agree on that, and on a stop.
"""

import traceback
from dataclasses import dataclass
from typing import Any

import torch

from trainapp.errors import TrainingStopped, UserError
from trainapp.hooks.callbacks import View
from trainapp.memory.picture import Picture
from trainapp.models.inspect import evaluation_mode
from trainapp.optim.schedules import rates
from trainapp.tracking.meter import spread_over_ranks
from trainapp.training import stopping
from trainapp.training.dependence import note_dependence
from trainapp.training.engine import UpdateResult
from trainapp.training.phase import UpdateContext
from trainapp.training.session import Session


@dataclass
class Verdict:
    """The outcome of a rank's callbacks: the message of an error, the reason for a stop, and whether to pause."""

    failure: str | None = None
    stop: str | None = None
    pauses: bool = False


def after_step(session: Session) -> None:
    """Call callbacks once per committed step: not for a retried or skipped one, nor again after a resume."""
    callbacks = session.callbacks
    step = session.state.progress.step
    last_step = callbacks.stepped_at
    callbacks.stepped_at = step
    if last_step not in (None, step) and callbacks.by_name:
        call(session, "after_step")


def end(session: Session) -> None:
    """Call callbacks after the last step. Raises TrainingStopped if a callback failed."""
    if session.meter.samples:
        call(session, "on_end")
    if session.callbacks.failure is None:
        return
    newest_checkpoint = None
    if session.config.activity.trains:
        newest_checkpoint = session.checkpointer.newest_name()
    saved_text = f"the run is saved in {newest_checkpoint}; " if newest_checkpoint else ""
    raise TrainingStopped(f"{session.callbacks.failure}\n{saved_text}fix the callback, or remove it, and restart")


def call(session: Session, method: str, *arguments: Any) -> None:
    """Call a method of all callbacks, in evaluation mode and without gradients; generators and modes are restored."""
    methods = list(session.callbacks.having(method))
    if not methods or session.callbacks.failure is not None:  # the run is about to end
        return

    # Run them one after the other, until one fails.
    verdict = Verdict()
    preserved = session.snapshot.preserved_generators()
    with session.meter.pause(), preserved, evaluation_mode(session.state.modules), torch.no_grad():
        for name, function in methods:
            try:
                function(_view(session, name, verdict), *arguments)
            except UserError as error:
                verdict.failure = str(error)
            except Exception as error:
                title = f"callbacks.{name}: {method} failed at step {session.state.progress.step}"
                trace = "".join(traceback.format_exception(error)).rstrip()
                verdict.failure = f"{title}\n{trace}"
            if verdict.failure:
                break

    # Leave no trace of their forwards and backwards.
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
    session.engine.drop_gradients()
    _act(session, verdict)


def _act(session: Session, verdict: Verdict) -> None:
    """Apply errors and stops of any rank on all ranks. Collective if callbacks exist."""
    progress = session.state.progress

    # Learn in one small exchange whether any rank wants something.
    wants_to_act = int(verdict != Verdict())
    signal_here = stopping.stop_heard(session)
    any_acts, signal_heard, any_pauses = session.ranks.all_reduce_max(wants_to_act, signal_here, int(verdict.pauses))
    if not session.is_finished:
        session.stop.agreed = signal_heard  # the callback may have taken long: no further step

    # The first rank's failure and the first rank's reason to stop are those of all.
    verdicts = [verdict]
    if session.ranks.world_size > 1 and any_acts:
        verdicts = session.ranks.all_gather_object(verdict)
    failures = [verdict.failure for verdict in verdicts if verdict.failure]
    session.callbacks.failure = None
    if failures:
        session.callbacks.failure = failures[0]
    stops = [verdict.stop for verdict in verdicts if verdict.stop]
    if stops and progress.stopped is None:
        progress.stopped = stops[0]
        session.tracker.note(f"stopping at step {progress.step}: {stops[0]}")
    if any_pauses and not signal_heard and not session.is_finished:
        session.stop.pause()


def _view(session: Session, name: str, verdict: Verdict) -> View:
    """Return a callback's view of the run, with functions to stop or pause it."""
    progress = session.state.progress
    length = session.limits.length
    length_is_known = length.steps_per_epoch is not None or session.config.train.max_steps is not None

    def stop(reason: str) -> None:
        if not reason.startswith("stopping."):
            reason = f"callbacks.{name}: {reason}"
        verdict.stop = verdict.stop or reason

    def pause() -> None:
        verdict.pauses = True

    return View(
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        model=session.state.model,
        run_dir=session.tracker.run_dir,
        tracker=session.tracker,
        rank=session.ranks.rank,
        world=session.ranks.world_size,
        waited=session.meter.waited,
        evaluated={name: batches.dataset for name, batches in session.eval_sets.items()},
        stop=stop,
        pause=pause,
        is_stopping=lambda: bool(stopping.stop_heard(session)),
        length=length.total_steps if length_is_known else None,
        is_scheduled=session.limits.evaluation_is_scheduled(progress),
        logged=dict(session.step_metrics),
    )


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
    note_dependence(session, context)  # what has been noticed since


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
