"""Events after a step or an evaluation, which can no longer be rolled back: logging, a plot of the step's memory, and
callbacks.

An error in a callback ends the run after its step is saved; all ranks agree on that, and on a stop.
"""

import functools
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainapp.errors import TrainingStopped, UserError
from trainapp.hooks.callbacks import View
from trainapp.losses.losses import has_embeddings
from trainapp.memory.live_tensors import Picture
from trainapp.models.inspect import batchnorms, evaluation_mode, instead_of_batchnorm, per_sample_buffers
from trainapp.optim.schedules import rates
from trainapp.rng import PADDING
from trainapp.tracking.meter import spread_over_ranks
from trainapp.training.engine import Totals
from trainapp.training.phase import UpdateContext
from trainapp.training.session import Session
from trainapp.units import listed


@dataclass
class Verdict:
    """The outcome of a rank's callbacks: the message of an error, the reason for a stop, and whether to pause."""

    failure: str | None = None
    stop: str | None = None
    pauses: bool = False


def after_step(session: Session) -> None:
    """Call callbacks once per committed step: not for a retried or skipped one, nor again after a resume."""
    callbacks, step = session.callbacks, session.state.progress.step
    before, callbacks.stepped_at = callbacks.stepped_at, step
    if before not in (None, step) and callbacks.by_name:
        call(session, "after_step")


def end(session: Session) -> None:
    """Call callbacks after the last step. Raises TrainingStopped if a callback failed."""
    if session.meter.samples:
        call(session, "on_end")
    if session.callbacks.failure is None:
        return
    newest = session.checkpointer.newest_name() if session.config.activity.trains else None
    saved = f"the run is saved in {newest}; " if newest else ""
    raise TrainingStopped(f"{session.callbacks.failure}\n{saved}fix the callback, or remove it, and restart")


def call(session: Session, method: str, *arguments: Any) -> None:
    """Call a method of all callbacks, in evaluation mode and without gradients; generators and modes are restored."""
    methods = list(session.callbacks.having(method))
    if not methods or session.callbacks.failure is not None:  # the run is about to end
        return
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
                verdict.failure = f"{title}\n{''.join(traceback.format_exception(error)).rstrip()}"
            if verdict.failure:
                break
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
    session.engine.drop_gradients()
    _act(session, verdict)


def _act(session: Session, own: Verdict) -> None:
    """Apply errors and stops of any rank on all ranks. Collective if callbacks exist."""
    by_rank = [own]
    differs, heard, pauses = session.ranks.all_reduce_max(int(own != Verdict()), session.stop_heard(), int(own.pauses))
    if not session.is_finished:
        session.stop.agreed = heard  # the callback may have taken long: no further step
    if session.ranks.world > 1 and differs:
        by_rank = session.ranks.all_gather_object(own)
    session.callbacks.failure = next((verdict.failure for verdict in by_rank if verdict.failure), None)
    stops = [verdict.stop for verdict in by_rank if verdict.stop]
    if stops and session.state.progress.stopped is None:
        session.state.progress.stopped = stops[0]
        session.tracker.note(f"stopping at step {session.state.progress.step}: {stops[0]}")
    if pauses and not heard and not session.is_finished:
        session.stop.pause()


def _view(session: Session, name: str, verdict: Verdict) -> View:
    progress, length = session.state.progress, session.limits.length
    is_known = length.steps_per_epoch is not None or session.config.train.max_steps is not None

    def stop(reason: str) -> None:
        verdict.stop = verdict.stop or (reason if reason.startswith("stopping.") else f"callbacks.{name}: {reason}")

    return View(
        step=progress.step,
        epoch=progress.epoch,
        samples=progress.samples,
        model=session.state.model,
        run_dir=session.tracker.run_dir,
        tracker=session.tracker,
        rank=session.ranks.rank,
        world=session.ranks.world,
        waited=session.meter.waited,
        evaluated={name: batches.dataset for name, batches in session.eval_sets.items()},
        stop=stop,
        pause=functools.partial(setattr, verdict, "pauses", True),
        is_stopping=lambda: bool(session.stop_heard()),
        length=length.total_steps if is_known else None,
        is_scheduled=session.evaluation_is_scheduled,
        logged=dict(session.attempt.logged),
    )


def log(session: Session, context: UpdateContext, totals: Totals, norm: Tensor, applied: bool) -> None:
    """Collect this update's metrics; write them after the step's last update. Waits for the device."""
    progress, batches = session.state.progress, session.batches
    if applied:
        session.engine.nonfinite.check()
        own = totals.means(session.ranks) | rates(context.update.optimizer) | {"grad_norm": float(norm)}
        session.attempt.logged |= {context.update.named(name): value for name, value in own.items()} | {
            "loss": own["loss"]
        }
    if progress.update or not session.attempt.logged:
        return
    size = session.sizes.train.size
    scalars = session.attempt.logged | {
        "epoch": batches.epochs(progress),
        "batch/global_size": batches.global_size,
        "batch/micro_size": size,
        "batch/accumulation": batches.accumulation(size),
        "batch/eval_micro_size": session.sizes.evaluation.size,
    }
    scalars |= session.meter.scalars()
    scalars |= spread_over_ranks(scalars, session.ranks)
    session.tracker.log(progress.step, progress.samples, scalars, session.objective.metric)
    note_dependence(session, context)  # what has been noticed since


def warn_nothing_counts(session: Session, context: UpdateContext) -> None:
    """Warn, once, that the loss counts nothing over a whole step."""
    session.tracker.warn_once(
        f"step {context.step_number}: the loss's count is 0 over the whole step, so there is no update; such steps "
        "count as skipped, and their samples as trained",
        topic="nothing counts",
    )


def warn_of_padding(session: Session) -> None:
    """Warn before the first step of results that depend on the padding, as the check of the loss has found."""
    for topic, text in session.engine.ledger.depends.items():
        if topic.startswith(PADDING):
            session.tracker.warn_once(text, topic=topic)


def note_dependence(session: Session, context: UpdateContext) -> None:
    """Note once what depends on the micro-batch: state that the forward writes, and what is not drawn by sample."""
    size = max(session.sizes.train.sizes_in_force.values(), default=session.sizes.train.size)
    ledger, is_cut = session.engine.ledger, session.batches.accumulation(size) > 1
    written, norms = session.snapshot.changes, set(batchnorms(session.state.model))
    statistics = {name for name in written if name.rpartition(".")[0].removeprefix("model.") in norms}
    other_state = written - statistics
    modules = {"model": session.state.model, **session.state.stateful.modules}
    other_state -= per_sample_buffers(modules)
    if has_embeddings(session.engine.task):  # which is called once per step
        other_state = {name for name in other_state if not name.partition(".")[0].endswith("task")}
    if is_cut and statistics:  # without any, its layers are in evaluation mode
        ledger.depends["batchnorm"] = (
            f"in training, BatchNorm normalises each micro-batch ({size}) by its own mean and variance, so outputs, "
            "gradients and running statistics depend on the size of the micro-batch; "
            f"{instead_of_batchnorm(session.config.model)} does not"
        )
    if is_cut and other_state:
        ledger.depends["writes"] = (
            f"the forward writes {listed(sorted(other_state))}, once per micro-batch ({size}), not per step: what is "
            "computed from them depends on the micro-batch"
        )
    if is_cut and ledger.draws and not session.engine.draws_by_sample:
        ledger.depends["draws"] = (
            f"the forward draws torch's own random numbers, which are those of the micro-batch ({size}); with "
            "train.draws=per_sample (not on mps) they do not depend on it"
        )
    for topic, text in ledger.depends.items() if is_cut else ():
        session.tracker.warn_once(f"step {context.step_number}: {text}", topic=topic)
    places = [own for of in ledger.places.values() for own in of.values()]
    if shared := sorted({own.kernel for own in places if own.axis is None and not own.varies}):
        text = f"drawn once per step, for all samples, since no dimension has their number: {', '.join(shared)}"
        session.tracker.warn_once(text, topic="shared draws")


def draw_timeline(session: Session) -> None:
    """Queue a plot of this step's memory, by category; on CUDA, write the allocator's snapshot instead."""
    step, path = session.state.progress.step, session.tracker.run_dir / "memory_timeline.png"
    with session.meter.pause():
        events, kinds = session.memory.events(session.engine.gradients())
        try:
            session.memory.dump(path.with_suffix(".snapshot.pickle"))
        except OSError as error:  # the run is more important than its record
            session.tracker.unwritable(path.parent, error)
    if events:
        title = f"memory of step {step}, micro-batch {session.sizes.train.size}"
        session.tracker.picture("memory_timeline", Picture(events, kinds, session.memory.budget, title, path), step)
    session.memory.keep_events = False
