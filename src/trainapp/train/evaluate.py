"""Evaluation: the whole evaluation set, each sample once."""

import contextlib
import time

import torch

from trainapp.data.batch import batch_length
from trainapp.data.micro_batch import MicroBatch
from trainapp.errors import UserError
from trainapp.rng import preserved_rng
from trainapp.train.losses import evaluate_metrics
from trainapp.train.run import Job
from trainapp.train.totals import Sums


@torch.no_grad()
def evaluate(job: Job) -> None:
    """The whole evaluation set, each sample once; goes on where an out-of-memory error interrupted it."""
    state, progress, started = job.state, job.state.progress, time.monotonic()
    job.guard.check()
    job.phase, job.attempt_started = "evaluate", started
    if job.evaluation is None:  # not after an error: a rank that evaluates by itself recovers by itself
        # Each rank proves its size by batches of its own, of which some have more than others: one decides for all.
        job.ranks.arm(job.ranks.smallest(-int(state.eval_micro.trying)) < 0)
        job.strategy.share_buffers()
        job.evaluation = Sums()
    state.model.eval()
    with preserved_rng(state.device), state.average.in_place_of_weights():
        for fetched in job.eval_batches.from_sample(job.evaluation.samples, state.eval_micro.size, job.ranks):
            for micro in state.eval_micro.split(fetched, job.eval_ranks):
                evaluate_batch(job, micro)
    if job.strategy.equal_batches:
        job.strategy.gradients_ready()
        state.eval_micro.succeeded(job.ranks, news=True)  # some may have met shapes that are new to others
    state.model.train()
    means, job.evaluation = job.evaluation.over(job.ranks).means(), None
    progress.evaluated_at = progress.step
    job.meter.pause(time.monotonic() - started)
    job.tracker.evaluated(progress.step, progress.samples, means)
    direction, metric = job.objective
    if metric not in means:
        raise UserError(f"objective={direction} {metric}: there is no such metric; there are {', '.join(means)}")
    progress.objective = means[metric]
    if progress.best is None or (means[metric] > progress.best) == (direction == "max"):
        progress.best, progress.best_step = means[metric], progress.step


def evaluate_batch(job: Job, micro: MicroBatch) -> None:
    """One evaluation micro-batch. Its sums count only once all of it is done."""
    state, memory = job.state, job.memory
    watched = state.eval_micro.watched
    with memory.watch(job.meter.resident(micro.data)) if watched else contextlib.nullcontext():
        with state.precision.autocast:
            loss, count, metrics = job.task(job.strategy.evaluate, micro.data)
        finished = evaluate_metrics(metrics)
    job.evaluation.add(loss, count, finished, batch_length(micro.data), micro.real)
    state.eval_micro.succeeded(job.eval_ranks)
