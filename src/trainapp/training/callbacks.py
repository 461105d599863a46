"""Calls the run's callbacks, where nothing can be rolled back any more, and acts on what they ask for.

An error in one of them ends the run, once its step is saved; all ranks agree on that, and on a stop.
"""

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainapp.errors import TrainingStopped, UserError
from trainapp.hooks.callbacks import View
from trainapp.models.inspect import evaluation_mode
from trainapp.training.run import Run


@dataclass
class Verdict:
    """What a rank's callbacks have left: the message of an error; the reason for a stop."""

    failure: str | None = None
    stop: str | None = None


def after_step(run: Run) -> None:
    """Once per committed step: neither for a retried nor for a skipped one, nor again after a resume."""
    callbacks, step = run.callbacks, run.state.progress.step
    before, callbacks.stepped_at = callbacks.stepped_at, step
    if before not in (None, step):
        _call(run, "after_step")


def after_evaluation(run: Run, metrics: Mapping[str, Any]) -> None:
    """metrics: numbers by name, and what metrics have computed that is no number."""
    _call(run, "after_evaluation", metrics)


def end(run: Run) -> None:
    """After the last step. Raises TrainingStopped for an error that a callback has ended the run with."""
    if run.meter.samples:
        _call(run, "on_end")
    if run.callbacks.failure is None:
        return
    newest = run.checkpointer.newest_name() if run.config.mode == "train" else None
    saved = f"the run is saved in {newest}; " if newest else ""
    raise TrainingStopped(f"{run.callbacks.failure}\n{saved}correct the callback, or leave it out, and restart")


def _call(run: Run, method: str, *arguments: Any) -> None:
    """With the model in evaluation mode and without gradients; generators and modes are restored."""
    methods = list(run.callbacks.having(method))
    if not methods or run.callbacks.failure is not None:  # the run is about to end
        return
    started, verdict = time.monotonic(), Verdict()
    roots = [run.state.model, *run.state.stateful.modules.values()]
    with run.snapshot.preserved_generators(), evaluation_mode(roots), torch.no_grad():
        for name, function in methods:
            try:
                function(_view(run, name, verdict), *arguments)
            except UserError as error:
                verdict.failure = str(error)
            except Exception as error:
                title = f"callbacks.{name}: {method} failed at step {run.state.progress.step}"
                verdict.failure = f"{title}\n{''.join(traceback.format_exception(error)).rstrip()}"
            if verdict.failure:
                break
    if run.strategy.forward_is_collective:
        run.strategy.finish_accumulation()
    run.engine.drop_gradients()
    run.meter.pause(time.monotonic() - started)
    _act(run, verdict)


def _act(run: Run, own: Verdict) -> None:
    """Collective where callbacks exist: one rank's wish is that of all."""
    by_rank = [own]
    if run.ranks.world > 1 and run.ranks.all_reduce_min(-int(own != Verdict())):
        by_rank = run.ranks.all_gather_object(own)
    run.callbacks.failure = next((verdict.failure for verdict in by_rank if verdict.failure), None)
    stops = [verdict.stop for verdict in by_rank if verdict.stop]
    if stops and run.state.progress.stopped is None:
        run.state.progress.stopped = stops[0]
        run.tracker.note(f"stopping at step {run.state.progress.step}: {stops[0]}")


def _view(run: Run, name: str, verdict: Verdict) -> View:
    progress = run.state.progress

    def stop(reason: str) -> None:
        verdict.stop = verdict.stop or (reason if reason.startswith("stopping.") else f"callbacks.{name}: {reason}")

    return View(
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        model=run.state.model,
        run_dir=run.tracker.run_dir,
        tracker=run.tracker,
        rank=run.ranks.rank,
        world=run.ranks.world,
        waited=run.meter.waited,
        evaluated={name: batches.dataset for name, batches in run.eval_sets.items()},
        stop=stop,
        logged=dict(run.logged),
    )
