"""Evaluation: every evaluation set in turn, each sample once."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from trainapp.config.validation import suggest
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
from trainapp.training.run import Evaluated, Objective, Run
from trainapp.training.totals import Totals

T = TypeVar("T")


@torch.no_grad()
def evaluate(run: Run) -> None:
    """Evaluate all samples of every set, from where an out-of-memory error interrupted it.

    Raises UserError for a metric that the task does not have, and whatever a metric raises.
    """
    progress, attempt, started = run.state.progress, run.attempt, time.monotonic()
    assert run.eval_sets, "evaluation without evaluation data"
    run.engine.nonfinite.check()
    attempt.phase, attempt.started = Phase.EVALUATE, started
    note_refused(run)
    for name, batches in run.eval_sets.items():
        if name not in attempt.evaluated:
            attempt.evaluated[name] = evaluate_set(run, name, batches)
    evaluated, attempt.evaluated = attempt.evaluated, {}
    means = _by_logged_name({name: own.means for name, own in evaluated.items()})
    results = _by_logged_name({name: own.results for name, own in evaluated.items()})
    run.last_evaluation = means
    progress.evaluated_at = progress.step
    run.meter.pause(time.monotonic() - started)
    run.tracker.evaluated(progress.step, progress.samples, means)
    record_objective(run, means)
    callbacks.after_evaluation(run, results | means)


def _by_logged_name(by_set: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of all sets, under the names in the log."""
    return {logged_name(name, metric): value for name, own in by_set.items() for metric, value in own.items()}


def evaluate_set(run: Run, name: str, batches: EvalBatches) -> Evaluated:
    """One set, all its samples. Collective."""
    state, sizes, attempt = run.state, run.sizes.evaluation, run.attempt
    tunes = run.autotuner.follow(sizes)
    if attempt.evaluation is None:  # not on a retry: a rank that evaluates alone recovers alone
        # Each rank proves its size on its own batches, whose number differs: agree once.
        all_proven = run.ranks.all_reduce_min(int(not (tunes or sizes.is_unproven))) == 1
        run.ranks.enable_votes(not all_proven)
        run.strategy.broadcast_buffers()
    if attempt.evaluation is None or batches.is_stream:  # which can only be read from its beginning
        attempt.evaluation, attempt.collector = Totals(), collector_for(run.task)
        run.metrics.reset()
    fetched = batches.from_sample(attempt.evaluation.samples, sizes.size, run.ranks)
    with as_evaluated(run, name):
        each_micro_batch(run, fetched, functools.partial(_totals_with, run), functools.partial(_keep, run))
        totals = attempt.collector.totals(run, attempt.evaluation, batches.is_stream)
    if run.strategy.forward_is_collective:
        run.strategy.finish_accumulation()
        sizes.succeeded(run.ranks, news=True)  # a rank may have seen shapes that are new to others
    totals = totals.over(run.ranks)
    results = run.metrics.results(run.ranks)
    evaluated = Evaluated(totals.means(run.ranks) | as_scalars(results), results)
    attempt.evaluation = attempt.collector = None
    run.metrics.reset()
    if totals.count == 0:
        run.tracker.warn_once(
            f"evaluation{f' of {name}' if name else ''} at step {state.progress.step}: the loss's count is 0 over the "
            "whole evaluation set, so the loss is nan",
            topic=f"nothing counts in evaluation {name}",
        )
    return evaluated


@contextlib.contextmanager
def as_evaluated(run: Run, name: str) -> Iterator[None]:
    """Evaluation mode, with the average's weights; the model's generators and modes are restored. name: of the data."""
    state = run.state
    seed_evaluation(state.device, state.seed, name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.snapshot.preserved_generators())
        stack.enter_context(state.average.in_place_of_weights())
        stack.enter_context(evaluation_mode((state.model, *state.stateful.modules.values())))
        stack.enter_context(run.snapshot.undone_on_error())
        yield


def each_micro_batch(
    run: Run, fetched: Iterable[MicroBatch], compute: Callable[[MicroBatch], T], keep: Callable[[MicroBatch, T], None]
) -> None:
    """The one loop over batches without training, within `as_evaluated`: of evaluations, predictions, generations.

    compute: the work on a micro-batch, which may run out of memory and is then repeated; nothing of it counts yet.
    keep: takes what it returned when the micro-batch is complete, on all ranks that evaluate together or on none.
    """
    sizes = run.sizes.evaluation
    for batch in fetched:
        for micro in sizes.cut(batch, run.eval_ranks):
            with run.metrics.undone_on_error():
                with watch_micro_batch(run, sizes, micro.data, micro.samples):
                    result = compute(micro)
                if sizes.is_unproven:
                    require_all_allocated(run, sizes, run.eval_ranks)
                run.snapshot.note_written()
                run.eval_ranks.check_peers()  # the last moment at which a micro-batch can be repeated
            keep(micro, result)
            run.snapshot.take()
            run.eval_ranks.check_peers()  # what follows is collective and has no vote
            sizes.succeeded(run.eval_ranks)


def _totals_with(run: Run, micro: MicroBatch) -> Totals:
    """The evaluation's totals, with this micro-batch."""
    totals = run.attempt.evaluation
    assert totals is not None, "outside an evaluation"
    with run.state.precision.autocast:
        loss, count, metrics = run.strategy.evaluate(run.attempt.collector.task, micro.data)
    finished = evaluate_metrics(metrics, run.metrics.names)
    if micro.real:
        run.metrics.update(metrics)
    # A copy: a loss that is a view would keep its micro-batch's tensors until the evaluation ends.
    return totals.plus(loss.clone(), count, finished, micro.samples, micro.real)


def _keep(run: Run, micro: MicroBatch, totals: Totals) -> None:
    run.attempt.collector.keep(micro.real)
    run.attempt.evaluation = totals


def record_objective(run: Run, means: dict[str, float]) -> None:
    """Record this evaluation's objective, and the best so far: nan and inf are never it."""
    progress, direction = run.state.progress, run.objective.direction
    metric = logged_name_of(run.objective.metric, means)
    if metric not in means:  # it may be one that only some batches have
        if progress.objective is None and not run.objective.is_known:
            raise no_such_metric(run.objective, map(setting_name, means))
        run.tracker.warn_once(
            f"objective={direction} {run.objective.metric}: the evaluation at step {progress.step} has no such metric, "
            f"which counts as nan; it has {', '.join(map(setting_name, means))}",
            topic="an evaluation without the objective",
        )
    progress.objective = value = means.get(metric, math.nan)
    for update in run.state.updates:
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
