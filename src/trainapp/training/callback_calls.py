"""Callbacks, called after a step or an evaluation, which can no longer be rolled back.

An error in a callback ends the run after its step is saved; all ranks agree on that, and on a stop.
"""

import traceback
from dataclasses import dataclass
from typing import Any

import torch

from trainapp.errors import TrainingStopped, UserError
from trainapp.hooks.callbacks import View
from trainapp.models.inspect import evaluation_mode
from trainapp.training import stopping
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
    signal_here = stopping.stop_requested(session)
    any_acts, stop_signal, any_pauses = session.ranks.all_reduce_max(wants_to_act, signal_here, int(verdict.pauses))
    if not session.is_finished:
        session.stop.agreed = stop_signal  # the callback may have taken long: no further step

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
    if any_pauses and not stop_signal and not session.is_finished:
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
        is_stopping=lambda: bool(stopping.stop_requested(session)),
        length=length.total_steps if length_is_known else None,
        is_scheduled=session.limits.evaluation_is_scheduled(progress),
        logged=dict(session.step_metrics),
    )
