"""Evaluation: every evaluation set in turn, each sample once."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainapp.data.batch import MicroBatch, ranges, tensors_in
from trainapp.data.eval_batches import EvalBatches
from trainapp.hooks.metrics import as_scalars, logged_name, no_such_metric
from trainapp.losses import contrastive
from trainapp.losses.losses import Metrics, evaluate_metrics, has_embeddings
from trainapp.models.inspect import evaluation_mode, per_sample_buffers
from trainapp.parallel.ranks import Ranks
from trainapp.rng import evaluation_key, seed_from
from trainapp.signals import Stopped
from trainapp.training import events
from trainapp.training.engine import Engine, Totals
from trainapp.training.phase import Phase
from trainapp.training.session import Evaluation, Session
from trainapp.training.transaction import note_refused, watched
from trainapp.units import listed

T = TypeVar("T")
EVALUATION = "evaluation"  # the name in the ledger of what its forwards draw


@torch.no_grad()
def evaluate(session: Session) -> None:
    """Evaluate all samples of every set, resuming after an out-of-memory error. After a stop, which all ranks agree on,
    nothing is evaluated: the evaluation is repeated as a whole after the resume.

    Raises UserError for a metric that the task does not have, and errors of metrics.
    """
    progress = session.state.progress
    assert session.eval_sets, "evaluation without evaluation data"
    session.engine.nonfinite.check()
    session.engine.phase, session.attempt.started = Phase.EVALUATE, time.monotonic()
    note_refused(session)
    try:
        with session.meter.pause():
            for name, batches in session.eval_sets.items():
                if name not in session.evaluation.finished:
                    session.evaluation.finished[name] = evaluate_set(session, name, batches)
    except Stopped:
        session.metrics.reset()
        if session.strategy.forward_is_collective:
            session.strategy.finish_accumulation()
        _undo_writes(session)
        session.evaluation = Evaluation(last=session.evaluation.last)
        return
    finished, session.evaluation.finished = session.evaluation.finished, {}
    values = {logged_name(name, metric): value for name, own in finished.items() for metric, value in own.items()}
    session.evaluation.last = means = {name: value for name, value in values.items() if isinstance(value, float)}
    progress.evaluated_at = progress.step
    session.checkpointer.saved_at = -1  # a checkpoint of this step, saved for a stop, lacks the results
    session.tracker.evaluated(progress.step, progress.samples, means)
    record_objective(session, means)
    events.call(session, "after_evaluation", values)


def evaluate_set(session: Session, name: str, batches: EvalBatches) -> dict[str, Any]:
    """Evaluate all samples of one set: its numbers, and results of stateful metrics that are none. Collective."""
    state, sizes, present = session.state, session.sizes.evaluation, session.evaluation
    tunes = session.sizes.autotuner.follow(sizes)
    if present.totals is None:  # skipped on a retry, which may run on one rank only
        # Each rank validates its size on its own batches, whose number differs: agree once.
        session.ranks.enable_votes(any(session.ranks.all_gather_object(tunes or sizes.is_unvalidated)))
        # Rows of a rank's own samples would be lost to training.
        rows = {name.removeprefix("model.") for name in per_sample_buffers({"model": session.state.model})}
        session.strategy.broadcast_buffers(except_for=rows)
    if present.totals is None or (batches.is_stream and not present.complete):  # a stream is read from its start
        _undo_writes(session)
        present.totals = Totals()
        present.embedded = Embedded(session.task) if has_embeddings(session.task) else None
        session.metrics.reset()
    _set_state_aside(session)
    fetched = batches.from_sample(present.totals.samples, sizes.size, session.ranks)
    with as_evaluated(session.engine, name):
        if not present.complete:  # otherwise one rank alone repeats what follows
            compute, keep = functools.partial(_totals_with, session), functools.partial(_keep, session)
            each_micro_batch(session, fetched, compute, keep)
            present.complete = True
        totals = present.totals if present.embedded is None else _of_whole_set(session, present.embedded, batches)
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
        sizes.succeeded(session.ranks, news=True)  # a rank may have seen shapes that are new to others
    _undo_writes(session)
    totals = totals.over(session.ranks)
    results = session.metrics.results(session.ranks, session.interruptible)
    values = results | totals.means(session.ranks) | as_scalars(results)
    present.totals, present.embedded, present.complete = None, None, False
    session.metrics.reset()
    if totals.count == 0:
        session.tracker.warn_once(
            f"evaluation{f' of {name}' if name else ''} at step {state.progress.step}: the loss's count is 0 over the "
            "whole evaluation set, so the loss is nan",
            topic=f"nothing counts in evaluation {name}",
        )
    return values


def _set_state_aside(session: Session) -> None:
    """Record the state that the evaluation of a set begins with, unless it continues after an error. With the weights'
    average in their place, which forwards may write, too.
    """
    if session.evaluation.before is None:
        with session.state.average.in_place_of_weights():
            session.evaluation.before = session.snapshot.set_aside()


def _undo_writes(session: Session) -> None:
    """Return to the state that was set aside, if any: training does not depend on what forwards in evaluation write."""
    if session.evaluation.before is None:
        return
    with session.state.average.in_place_of_weights():
        lost = session.snapshot.return_to(session.evaluation.before)
    session.evaluation.before = None
    if lost:
        what = f"the evaluation at step {session.state.progress.step}"
        session.tracker.warn_once(written_without_copy(what, lost), topic="parameters written in evaluation")


def written_without_copy(what: str, names: Sequence[str]) -> str:
    """A warning about parameters whose first write in place cannot be undone. what: the work that has written them."""
    return (
        f"{what} is the first to write {listed(names)} in place, of which there was no copy yet (from now on there "
        "is): training continues with what it has written. Make them buffers, which are always copied"
    )


@contextlib.contextmanager
def as_evaluated(engine: Engine, name: str, work: str = EVALUATION) -> Iterator[None]:
    """Evaluation mode with EMA weights; RNGs and module modes are restored. name: the evaluation set. work: what its
    draws are known by in the ledger.
    """
    state, snapshot = engine.state, engine.snapshot
    key = evaluation_key(state.seed, name)
    seed_from(state.device, *key)
    engine.draws_for = work, key
    preserved = snapshot.preserved_generators()
    with preserved, state.average.in_place_of_weights(), evaluation_mode(state.modules), snapshot.undone_on_error():
        yield


def each_micro_batch(
    session: Session,
    fetched: Iterable[MicroBatch],
    compute: Callable[[MicroBatch], T],
    keep: Callable[[MicroBatch, T], None],
) -> None:
    """The shared no-training loop for evaluation, prediction and generation, inside `as_evaluated`. Ends early once a
    signal is heard; at its end all ranks agree on that, and raise Stopped.

    compute: the work on a micro-batch, repeated if it runs out of memory; its results do not count yet.
    keep: takes the result of a complete micro-batch, on all ranks that evaluate together or on none.
    """
    sizes = session.sizes.evaluation
    for micro in (micro for batch in fetched for micro in sizes.cut(batch, session.eval_ranks)):
        with session.metrics.undone_on_error():
            watching = watched(session, sizes, micro.data, micro.samples)
            with watching, session.engine.drawing(micro):
                result = compute(micro)
            session.snapshot.note_written()
            session.eval_ranks.check_peers()  # last chance to repeat a micro-batch
        keep(micro, result)
        session.snapshot.take()
        (stop,) = session.eval_ranks.all_reduce_max(session.stop_heard())  # also a vote: what comes next has none
        sizes.succeeded(session.eval_ranks)
        if stop:
            break
    session.agree_on_stop()


def _totals_with(session: Session, micro: MicroBatch) -> Totals:
    """The evaluation's totals, including this micro-batch."""
    present = session.evaluation
    assert present.totals is not None, "outside an evaluation"
    task = session.task if present.embedded is None else present.embedded.task
    loss, count, metrics = session.engine.evaluate(task, micro.data)
    finished = evaluate_metrics(metrics, session.metrics.names)
    if micro.real:
        session.metrics.update(metrics)
    # A copy: a loss that is a view would keep its micro-batch's tensors until the evaluation ends.
    return present.totals.plus(loss.clone(), count, finished, micro.samples, micro.real)


def _keep(session: Session, micro: MicroBatch, totals: Totals) -> None:
    if session.evaluation.embedded is not None:
        session.evaluation.embedded.keep(micro.real)
    session.evaluation.totals = totals


def _of_whole_set(session: Session, embedded: "Embedded", batches: EvalBatches) -> Totals:
    """This rank's totals of a set whose batches are embedded. Collective on the first call only, so a retry may run on
    one rank.
    """
    parts = embedded.gathered(session.ranks, batches.is_stream, session.config.batch.global_size)
    session.metrics.reset()  # drops results of an attempt that ran out of memory
    of_all = Totals()
    for start, chosen in parts:
        if session.stop_heard():
            break
        watching = watched(session, session.sizes.evaluation, chosen, always=True)
        with watching, session.state.precision.autocast:
            seed_from(session.state.device, session.state.seed, start)  # the same on all ranks
            loss, count, metrics = embedded.loss_of(chosen, session.state.device)
            finished = evaluate_metrics(metrics, session.metrics.names)
            session.metrics.update(metrics)
        of_all = of_all.plus(loss.clone(), count, finished)
    session.agree_on_stop()
    return of_all


def record_objective(session: Session, means: dict[str, float]) -> None:
    """Record this evaluation's objective and, if it has a direction, the best so far; nan and inf never are, nor is an
    evaluation before the first step. Schedules follow scheduled evaluations only.
    """
    progress, (direction, metric) = session.state.progress, session.objective
    if metric not in means:  # only some batches may have it
        if progress.objective is None:
            raise no_such_metric("objective", direction or "auto", metric, means)
        session.tracker.warn_once(
            f"objective={direction or 'auto'} {metric}: the evaluation at step {progress.step} has no such metric, "
            f"which counts as nan; it has {', '.join(means)}",
            topic="an evaluation without the objective",
        )
    progress.objective = value = means.get(metric, math.nan)
    if session.evaluation_is_scheduled:
        for update in session.state.updates:
            update.schedule.evaluated(value)
    only_checks = session.config.mode == "train" and progress.step == 0
    if direction is None or only_checks:
        return
    best = progress.best
    is_better = best is None or (value > best if direction == "max" else value < best)
    if math.isfinite(value) and is_better:
        progress.best, progress.best_step = value, progress.step


class Embedded:
    """The embeddings of all batches of a set; the loss is computed for `batch.global_size` of them at a time, in the
    order of the data, as in training, so it depends neither on the evaluation's micro-batch nor on the ranks.

    They are kept on the host: copying them waits for the device once per batch.
    """

    def __init__(self, task: Any):
        self._own = task
        self._embedded: Any = None  # embeddings of the current batch
        self._structure: Any = None
        self._kept: list[list[Tensor]] = []
        self._whole: list[Tensor] | None = None  # from all ranks; empty except on rank 0, which computes the loss

    def task(self, model: nn.Module, batch: Any) -> tuple[Tensor, float, Metrics]:
        """Embed a batch; the loss is computed later."""
        self._embedded = contrastive.embed(self._own, model, batch)
        first = tensors_in(self._embedded)[0]
        return torch.zeros((), device=first.device), 0, {}

    def keep(self, real: bool) -> None:
        """Finish a batch, on all ranks that evaluate together."""
        if real:
            self._structure = self._embedded
            self._kept.append([tensor.detach().cpu().clone() for tensor in tensors_in(self._embedded)])
        self._embedded = None

    def gathered(self, ranks: Ranks, interleaved: bool, size: int) -> Iterator[tuple[int, list[Tensor]]]:
        """All ranks' embeddings, `size` samples at a time, with the index of the first: on rank 0, none on the others.
        Collective on the first call only, so a retry may run on one rank.
        """
        if self._whole is None:
            ranks.check_peers()
            own = contrastive.join(self._kept, self._own.setting) if self._kept else []
            parts = [part for part in ranks.all_gather_object(own) if part]  # none for a stream without samples
            self._whole = _in_order(parts, interleaved, self._own.setting) if parts and ranks.is_rank_zero else []
            self._kept = []
        samples = len(self._whole[0]) if self._whole else 0
        return ((start, [own[start:end] for own in self._whole]) for start, end in ranges(0, samples, size))

    def loss_of(self, chosen: list[Tensor], device: torch.device) -> tuple[Tensor, Any, Metrics]:
        """The loss of these samples' embeddings."""
        own = [tensor.to(device) for tensor in chosen]
        loss: tuple[Tensor, Any, Metrics] = self._own.loss_of_embeddings(contrastive.like(self._structure, own))
        return loss


def _in_order(parts: list[list[Tensor]], interleaved: bool, setting: str) -> list[Tensor]:
    """The rows of all ranks in the order of the data."""
    joined = contrastive.join(parts, setting)
    if not interleaved or len(parts) == 1:
        return joined
    numbers = [torch.arange(len(part[0])) * len(parts) + rank for rank, part in enumerate(parts)]
    order = torch.cat(numbers).argsort()
    return [tensor[order] for tensor in joined]
