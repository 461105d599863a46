"""Calls the run's callbacks, where nothing can be rolled back any more, and acts on what they ask for.

An error in one of them ends the run, once its step is saved; all ranks agree on that, and on a stop.
"""

import contextlib
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainapp.checkpoint.owner import copied
from trainapp.errors import TrainingStopped, UserError
from trainapp.hooks.callbacks import View
from trainapp.rng import preserved_rng
from trainapp.train.callback_guard import differences, made_of, preserved_states
from trainapp.train.modes import evaluation_mode
from trainapp.train.run import Run
from trainapp.train.step import drop_gradients
from trainapp.units import listed


@dataclass
class Verdict:
    """What a rank's callbacks have left: the message of an error; what they have changed; the reason for a stop."""

    failure: str | None = None
    changed: str | None = None
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
    """After the last step. Raises TrainingStopped for an error that a callback or a metric has ended the run with."""
    if run.metrics.failure is None and run.meter.samples:
        _call(run, "on_end")
    newest = run.checkpointer.newest_name() if run.config.mode == "train" else None
    kept = f"the run is saved in {newest}; " if newest else ""
    if run.metrics.failure is not None:
        repeats = ", which repeats the evaluation" if newest else ""
        text, again = str(run.metrics.failure), f"{kept}restart{repeats}"
        separator = "\n" if "\n" in text else "; "  # of a traceback
        raise TrainingStopped(f"{text}{separator}{again}") from run.metrics.failure.__cause__
    if run.callbacks.failure is not None:
        raise TrainingStopped(f"{run.callbacks.failure}\n{kept}correct the callback, or leave it out, and restart")


def _call(run: Run, method: str, *arguments: Any) -> None:
    methods = list(run.callbacks.having(method))
    if not methods or run.callbacks.failure is not None:  # the run is about to end
        return
    started, verdict = time.monotonic(), Verdict()
    with _nothing_changed(run, verdict):
        for name, function in methods:
            try:
                function(_view(run, name, verdict), *map(_own_copy, arguments))
            except UserError as error:
                verdict.failure = str(error)
            except Exception as error:
                verdict.failure = _explained(error, f"callbacks.{name}: {method} failed at step {_step(run)}")
            if verdict.failure:
                break
    run.meter.pause(time.monotonic() - started)
    _act(run, verdict, method)


def _act(run: Run, own: Verdict, method: str) -> None:
    """Collective where callbacks exist: one rank's wish is that of all."""
    by_rank = [own]
    if run.ranks.world > 1 and run.ranks.all_reduce_min(-int(own != Verdict())):
        by_rank = run.ranks.all_gather_object(own)
    if changed := [verdict.changed for verdict in by_rank if verdict.changed]:
        raise TrainingStopped(
            f"{method} of a callback has changed {changed[0]}: callbacks may look at the model, not change it, or a "
            f"resumed run would be another one. The last checkpoint is {run.checkpointer.newest_name() or 'none'}; "
            "change a copy (copy.deepcopy(view.model))"
        )
    run.callbacks.failure = next((verdict.failure for verdict in by_rank if verdict.failure), None)
    stops = [verdict.stop for verdict in by_rank if verdict.stop]
    if stops and run.state.progress.stopped is None:
        run.state.progress.stopped = stops[0]
        run.tracker.note(f"stopping at step {_step(run)}: {stops[0]}")


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


@contextlib.contextmanager
def _nothing_changed(run: Run, verdict: Verdict) -> Iterator[None]:
    """Around callbacks: generators, modes and what else has state are restored. Notes other changes of the model, as
    `made_of` sees them.
    """
    model, stateful = run.state.model, run.state.stateful
    roots = {"": model, **stateful.modules}
    before = made_of(roots)
    with preserved_rng(run.state.device), preserved_states(stateful), evaluation_mode([model]), torch.no_grad():
        yield
    if run.strategy.forward_is_collective:
        run.strategy.finish_accumulation()
    drop_gradients(run)
    changed = differences(before, made_of(roots))
    verdict.changed = listed(changed, most=5) if changed else None


def _own_copy(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """For one callback: the next one, and the run itself, have the numbers as they were."""
    own = dict(metrics)
    for name, value in metrics.items():
        with contextlib.suppress(Exception):  # an object that a metric has made, and that cannot be copied
            own[name] = copied(value)
    return own


def _step(run: Run) -> int:
    return run.state.progress.step


def _explained(error: Exception, title: str) -> str:
    """The user's part of the traceback: without the frame that has called the callback."""
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return f"{title}\n{''.join(traceback.format_exception(type(error), error, own)).rstrip()}"
