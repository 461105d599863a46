"""Evaluation: the whole evaluation set, each sample once."""

import contextlib
import time

import torch

from trainapp.data.batch import batch_length
from trainapp.data.micro_batch import MicroBatch
from trainapp.errors import UserError
from trainapp.rng import preserved_rng
from trainapp.train.losses import evaluate_metrics
from trainapp.train.run import Run
from trainapp.train.totals import Totals


@torch.no_grad()
def evaluate(run: Run) -> None:
    """The whole evaluation set, each sample once; goes on where an out-of-memory error interrupted it."""
    state, progress, started = run.state, run.state.progress, time.monotonic()
    run.guard.check()
    run.phase, run.attempt_started = "evaluate", started
    if run.evaluation is None:  # not after an error: a rank that evaluates by itself recovers by itself
        # Each rank proves its size by batches of its own, of which some have more than others: one decides for all.
        run.ranks.enable_votes(run.ranks.all_reduce_min(-int(state.eval_micro.is_unproven)) < 0)
        run.strategy.broadcast_buffers()
        run.evaluation = Totals()
    state.model.eval()
    with preserved_rng(state.device), state.average.in_place_of_weights():
        for fetched in run.eval_batches.from_sample(run.evaluation.samples, state.eval_micro.size, run.ranks):
            for micro in state.eval_micro.cut(fetched, run.eval_ranks):
                evaluate_batch(run, micro)
    if run.strategy.forward_is_collective:
        run.strategy.finish_accumulation()
        state.eval_micro.succeeded(run.ranks, news=True)  # some may have met shapes that are new to others
    state.model.train()
    means, run.evaluation = run.evaluation.over(run.ranks).means(), None
    progress.evaluated_at = progress.step
    run.meter.pause(time.monotonic() - started)
    run.tracker.evaluated(progress.step, progress.samples, means)
    direction, metric = run.objective
    if metric not in means:
        raise UserError(f"objective={direction} {metric}: there is no such metric; there are {', '.join(means)}")
    progress.objective = means[metric]
    if progress.best is None or (means[metric] > progress.best) == (direction == "max"):
        progress.best, progress.best_step = means[metric], progress.step


def evaluate_batch(run: Run, micro: MicroBatch) -> None:
    """One evaluation micro-batch. Its sums count only once all of it is done."""
    state, memory = run.state, run.memory
    watched = state.eval_micro.needs_watching
    with memory.watch(run.meter.resident(micro.data)) if watched else contextlib.nullcontext():
        with state.precision.autocast:
            loss, count, metrics = run.task(run.strategy.evaluate, micro.data)
        finished = evaluate_metrics(metrics)
    run.evaluation.add(loss, count, finished, batch_length(micro.data), micro.real)
    state.eval_micro.succeeded(run.eval_ranks)
