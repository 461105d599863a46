"""Evaluation: every evaluation set in turn, each sample once."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from trainapp.data.batch import MicroBatch
from trainapp.data.source import EvalBatches
from trainapp.errors import UserError
from trainapp.hooks.metrics import as_scalars, logged_name, logged_name_of, setting_name
from trainapp.losses.losses import evaluate_metrics
from trainapp.models.inspect import evaluation_mode
from trainapp.rng import seed_evaluation
from trainapp.training import callbacks
from trainapp.training.allocations import note_refused, require_all_allocated
from trainapp.training.eval_collectors import collector_for
from trainapp.training.micro_batches import watch_micro_batch
from trainapp.training.phase import Phase
from trainapp.training.session import Evaluated, Objective, Session
from trainapp.training.totals import Totals
from trainapp.units import suggest

T = TypeVar("T")


@torch.no_grad()
def evaluate(session: Session) -> None:
    """Evaluate all samples of every set, from where an out-of-memory error interrupted it.

    Raises UserError for a metric that the task does not have, and whatever a metric raises.
    """
    progress, attempt, started = session.state.progress, session.attempt, time.monotonic()
    assert session.eval_sets, "evaluation without evaluation data"
    session.engine.nonfinite.check()
    attempt.phase, attempt.started = Phase.EVALUATE, started
    note_refused(session)
    for name, batches in session.eval_sets.items():
        if name not in attempt.evaluated:
            attempt.evaluated[name] = evaluate_set(session, name, batches)
    evaluated, attempt.evaluated = attempt.evaluated, {}
    means = _by_logged_name({name: own.means for name, own in evaluated.items()})
    results = _by_logged_name({name: own.results for name, own in evaluated.items()})
    session.last_evaluation = means
    progress.evaluated_at = progress.step
    session.meter.pause(time.monotonic() - started)
    session.tracker.evaluated(progress.step, progress.samples, means)
    record_objective(session, means)
    callbacks.after_evaluation(session, results | means)


def _by_logged_name(by_set: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of all sets, under the names in the log."""
    return {logged_name(name, metric): value for name, own in by_set.items() for metric, value in own.items()}


def evaluate_set(session: Session, name: str, batches: EvalBatches) -> Evaluated:
    """One set, all its samples. Collective."""
    state, sizes, attempt = session.state, session.sizes.evaluation, session.attempt
    tunes = session.autotuner.follow(sizes)
    if attempt.evaluation is None:  # not on a retry: a rank that evaluates alone recovers alone
        # Each rank validates its size on its own batches, whose number differs: agree once.
        all_validated = session.ranks.all_reduce_min(int(not (tunes or sizes.is_unvalidated))) == 1
        session.ranks.enable_votes(not all_validated)
        session.strategy.broadcast_buffers()
    if attempt.evaluation is None or batches.is_stream:  # which can only be read from its beginning
        attempt.evaluation, attempt.collector = Totals(), collector_for(session.task)
        session.metrics.reset()
    fetched = batches.from_sample(attempt.evaluation.samples, sizes.size, session.ranks)
    with as_evaluated(session, name):
        each_micro_batch(session, fetched, functools.partial(_totals_with, session), functools.partial(_keep, session))
        totals = attempt.collector.totals(session, attempt.evaluation, batches.is_stream)
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
        sizes.succeeded(session.ranks, news=True)  # a rank may have seen shapes that are new to others
    totals = totals.over(session.ranks)
    results = session.metrics.results(session.ranks)
    evaluated = Evaluated(totals.means(session.ranks) | as_scalars(results), results)
    attempt.evaluation = attempt.collector = None
    session.metrics.reset()
    if totals.count == 0:
        session.tracker.warn_once(
            f"evaluation{f' of {name}' if name else ''} at step {state.progress.step}: the loss's count is 0 over the "
            "whole evaluation set, so the loss is nan",
            topic=f"nothing counts in evaluation {name}",
        )
    return evaluated


@contextlib.contextmanager
def as_evaluated(session: Session, name: str) -> Iterator[None]:
    """Evaluation mode, with the average's weights; the model's generators and modes are restored. name: of the data."""
    state = session.state
    seed_evaluation(state.device, state.seed, name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.snapshot.preserved_generators())
        stack.enter_context(state.average.in_place_of_weights())
        stack.enter_context(evaluation_mode((state.model, *state.stateful.modules.values())))
        stack.enter_context(session.snapshot.undone_on_error())
        yield


def each_micro_batch(
    session: Session,
    fetched: Iterable[MicroBatch],
    compute: Callable[[MicroBatch], T],
    keep: Callable[[MicroBatch, T], None],
) -> None:
    """The one loop over batches without training, within `as_evaluated`: of evaluations, predictions, generations.

    compute: the work on a micro-batch, which may run out of memory and is then repeated; nothing of it counts yet.
    keep: takes what it returned when the micro-batch is complete, on all ranks that evaluate together or on none.
    """
    sizes = session.sizes.evaluation
    for batch in fetched:
        for micro in sizes.cut(batch, session.eval_ranks):
            with session.metrics.undone_on_error():
                with watch_micro_batch(session, sizes, micro.data, micro.samples):
                    result = compute(micro)
                if sizes.is_unvalidated:
                    require_all_allocated(session, sizes, session.eval_ranks)
                session.snapshot.note_written()
                session.eval_ranks.check_peers()  # the last moment at which a micro-batch can be repeated
            keep(micro, result)
            session.snapshot.take()
            session.eval_ranks.check_peers()  # what follows is collective and has no vote
            sizes.succeeded(session.eval_ranks)


def _totals_with(session: Session, micro: MicroBatch) -> Totals:
    """The evaluation's totals, with this micro-batch."""
    totals = session.attempt.evaluation
    assert totals is not None, "outside an evaluation"
    with session.state.precision.autocast:
        loss, count, metrics = session.strategy.evaluate(session.attempt.collector.task, micro.data)
    finished = evaluate_metrics(metrics, session.metrics.names)
    if micro.real:
        session.metrics.update(metrics)
    # A copy: a loss that is a view would keep its micro-batch's tensors until the evaluation ends.
    return totals.plus(loss.clone(), count, finished, micro.samples, micro.real)


def _keep(session: Session, micro: MicroBatch, totals: Totals) -> None:
    session.attempt.collector.keep(micro.real)
    session.attempt.evaluation = totals


def record_objective(session: Session, means: dict[str, float]) -> None:
    """Record this evaluation's objective, and the best so far: nan and inf are never it."""
    progress, direction = session.state.progress, session.objective.direction
    metric = logged_name_of(session.objective.metric, means)
    if metric not in means:  # it may be one that only some batches have
        if progress.objective is None and not session.objective.is_known:
            raise no_such_metric(session.objective, map(setting_name, means))
        session.tracker.warn_once(
            f"objective={direction} {session.objective.metric}: the evaluation at step {progress.step} has no such "
            f"metric, which counts as nan; it has {', '.join(map(setting_name, means))}",
            topic="an evaluation without the objective",
        )
    progress.objective = value = means.get(metric, math.nan)
    for update in session.state.updates:
        update.schedule.evaluated(value)
    best = progress.best
    is_better = best is None or (value > best if direction == "max" else value < best)
    if math.isfinite(value) and is_better:
        progress.best, progress.best_step = value, progress.step


def no_such_metric(objective: Objective, known: Iterable[str], setting: str = "objective") -> UserError:
    """The error for a metric that the task does not have."""
    names = sorted(known)
    return UserError(
        f"{setting}={objective.direction} {objective.metric}: there is no such metric; there are {', '.join(names)}"
        f"{suggest(objective.metric, names)}"
    )
