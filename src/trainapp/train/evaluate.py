"""Evaluation: every evaluation set in turn, each sample once."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from trainapp.data.eval_stream import EvalStream
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.sampler import EvalBatches
from trainapp.errors import UserError
from trainapp.rng import preserved_rng
from trainapp.train.allocations import note_refused, require_all_allocated
from trainapp.train.losses import evaluate_metrics
from trainapp.train.phase import Phase
from trainapp.train.run import Run
from trainapp.train.totals import Totals


@torch.no_grad()
def evaluate(run: Run) -> None:
    """Evaluate all samples of every set, from where an out-of-memory error interrupted it. Raises UserError for a
    metric that the task does not have.
    """
    progress, attempt, started = run.state.progress, run.attempt, time.monotonic()
    assert run.eval_sets, "evaluation without evaluation data"
    run.nonfinite.check()
    attempt.phase, attempt.started = Phase.EVALUATE, started
    note_refused(run)
    for name, batches in run.eval_sets.items():
        if name not in attempt.evaluated:
            attempt.evaluated[name] = evaluate_set(run, name, batches)
    means = {_logged(name, metric): value for name, own in attempt.evaluated.items() for metric, value in own.items()}
    attempt.evaluated = {}
    run.last_evaluation = means
    progress.evaluated_at = progress.step
    run.meter.pause(time.monotonic() - started)
    run.tracker.evaluated(progress.step, progress.samples, means)
    record_objective(run, means)


def _logged(name: str, metric: str) -> str:
    """How a metric is logged: `loss`, or `eval_NAME/loss` of a set that has a name."""
    return f"eval_{name}/{metric}" if name else metric


def evaluate_set(run: Run, name: str, batches: EvalBatches | EvalStream) -> dict[str, float]:
    """The means of one set over all its samples. Collective."""
    state, sizes, attempt = run.state, run.sizes.evaluation, run.attempt
    tunes = run.autotuner.follow(sizes)
    if attempt.evaluation is None:  # not on a retry: a rank that evaluates alone recovers alone
        # Each rank proves its size on its own batches, whose number differs: agree once.
        all_proven = run.ranks.all_reduce_min(int(not (tunes or sizes.is_unproven))) == 1
        run.ranks.enable_votes(not all_proven)
        run.strategy.broadcast_buffers()
        attempt.evaluation = Totals()
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_rng(state.device))
        stack.enter_context(state.stateful.preserved_generators())
        stack.enter_context(state.average.in_place_of_weights())
        stack.enter_context(evaluation_mode((state.model, *state.stateful.modules.values())))
        stack.enter_context(run.restore_point.undone_on_error(sizes.is_unproven))
        for fetched in batches.from_sample(attempt.evaluation.samples, sizes.size, run.ranks):
            for micro in sizes.cut(fetched, run.eval_ranks):
                evaluate_batch(run, micro)
    if run.strategy.forward_is_collective:
        run.strategy.finish_accumulation()
        sizes.succeeded(run.ranks, news=True)  # a rank may have seen shapes that are new to others
    totals = attempt.evaluation.over(run.ranks)
    means, attempt.evaluation = totals.means(run.ranks), None
    if totals.count == 0:
        run.tracker.note_once(
            f"evaluation{f' of {name}' if name else ''} at step {state.progress.step}: the loss's count is 0 over the "
            "whole evaluation set, so the loss is nan",
            topic=f"nothing counts in evaluation {name}",
        )
    return means


@contextlib.contextmanager
def evaluation_mode(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Evaluation mode inside the block, for each module its own mode after it: a part of a model may be in evaluation
    mode for good.
    """
    modes = [(module, module.training) for root in roots for module in root.modules()]
    try:
        for module, _ in modes:
            module.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate_batch(run: Run, micro: MicroBatch) -> None:
    """One evaluation micro-batch. Counted only when complete, and on all ranks or none."""
    sizes, totals = run.sizes.evaluation, run.attempt.evaluation
    assert totals is not None, "outside an evaluation"
    watch = run.memory.watch(run.meter.resident(micro.data)) if sizes.needs_watching else contextlib.nullcontext()
    with watch:
        with run.state.precision.autocast:
            loss, count, metrics = run.strategy.evaluate(run.task, micro.data)
        finished = evaluate_metrics(metrics)
    if sizes.is_unproven:
        require_all_allocated(run, sizes, run.eval_ranks)
    run.restore_point.tensors.note_written()
    totals = totals.plus(loss, count, finished, micro.samples, micro.real)
    run.eval_ranks.check_peers()  # the last moment at which a micro-batch can be repeated
    run.attempt.evaluation = totals
    run.restore_point.take(sizes.is_unproven)
    run.eval_ranks.check_peers()  # what follows is collective and has no vote
    sizes.succeeded(run.eval_ranks)


def record_objective(run: Run, means: dict[str, float]) -> None:
    """Record this evaluation's objective, and the best so far: nan and inf are never it."""
    progress, (direction, metric) = run.state.progress, run.objective
    if metric not in means and f"eval_{metric}" in means:  # NAME/METRIC of a set that has a name
        metric = f"eval_{metric}"
    if metric not in means and progress.objective is None:  # else it is one that only some batches have
        names = ", ".join(name.removeprefix("eval_") if "/" in name else name for name in means)
        raise UserError(f"objective={direction} {metric}: there is no such metric; there are {names}")
    progress.objective = value = means.get(metric, math.nan)
    best = progress.best
    is_better = best is None or (value > best if direction == "max" else value < best)
    if math.isfinite(value) and is_better:
        progress.best, progress.best_step = value, progress.step
