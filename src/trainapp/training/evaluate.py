"""Evaluation: every evaluation set in turn, each sample once."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from trainapp.data.batch import MicroBatch
from trainapp.data.eval_batches import EvalBatches
from trainapp.hooks.metrics import as_scalars, logged_name, no_such_metric
from trainapp.losses.losses import evaluate_metrics, has_embeddings
from trainapp.losses.set_embeddings import SetEmbeddings
from trainapp.models.inspect import evaluation_mode, per_sample_buffers, per_sample_tensors, rows_written
from trainapp.rng import evaluation_key, seed_from
from trainapp.signals import Stopped
from trainapp.training import events, stopping
from trainapp.training.engine import Engine, Totals
from trainapp.training.memory_watch import begin_counting_refused, watched
from trainapp.training.phase import Phase
from trainapp.training.session import Evaluation, Session
from trainapp.units import listed

T = TypeVar("T")
EVALUATION = "evaluation"  # the name in the record of what its forwards draw


@torch.no_grad()
def evaluate(session: Session) -> None:
    """Evaluate all samples of every set, resuming after an out-of-memory error. After a stop, which all ranks agree on,
    nothing is evaluated: the evaluation is repeated as a whole after the resume.

    Raises UserError for a metric that the task does not have, and errors of metrics.
    """
    assert session.eval_sets, "evaluation without evaluation data"
    session.attempt.started = time.monotonic()
    begin_counting_refused(session)

    # Evaluate the sets that are not finished yet: after an error, it continues with the one that failed.
    with session.engine.at(Phase.EVALUATE):
        session.engine.nonfinite.check()
        try:
            with session.meter.pause():
                for name, batches in session.eval_sets.items():
                    if name not in session.evaluation.finished:
                        session.evaluation.finished[name] = evaluate_set(session, name, batches)
        except Stopped:
            _forget_evaluation(session)
            return
        _record_results(session)


def _forget_evaluation(session: Session) -> None:
    """Undo an evaluation that a stop has cut short. Collective."""
    session.metrics.reset()
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
    _undo_writes(session)
    session.evaluation = Evaluation(last=session.evaluation.last)


def _record_results(session: Session) -> None:
    """Log the results of all sets, note the objective and call the callbacks."""
    progress = session.state.progress
    values = {}
    for name, metrics in session.evaluation.finished.items():
        for metric, value in metrics.items():
            values[logged_name(name, metric)] = value
    session.evaluation.finished = {}

    # Results of stateful metrics that are no numbers go to callbacks only.
    means = {name: value for name, value in values.items() if isinstance(value, float)}
    session.evaluation.last = means
    progress.evaluated_at = progress.step
    session.checkpointer.saved_at = -1  # a checkpoint of this step, saved for a stop, lacks the results
    session.tracker.log_evaluation(progress.step, progress.samples, means)
    record_objective(session, means)
    events.call(session, "after_evaluation", values)


def evaluate_set(session: Session, name: str, batches: EvalBatches) -> dict[str, Any]:
    """Evaluate all samples of one set. Return its metrics by name, and results of stateful metrics. Collective."""
    sizes = session.sizes.evaluation
    current = session.evaluation
    autotuner = session.sizes.autotuner
    tunes = autotuner is not None and autotuner.follow(sizes)

    # Make the ranks equal; skipped on a retry, which may run on one rank only.
    if current.totals is None:
        # Each rank validates its size on its own batches, whose number differs: agree once.
        votes = session.ranks.all_gather_object(tunes or sizes.is_unvalidated)
        session.ranks.enable_votes(any(votes))
        # Rows of a rank's own samples would be lost to training.
        names = per_sample_buffers({"model": session.state.model})
        rows = {name.removeprefix("model.") for name in names}
        session.strategy.broadcast_buffers(except_for=rows)

    # Begin the set, or begin it again.
    must_begin_again = batches.is_stream and not current.complete  # a stream is read from its start
    if current.totals is None or must_begin_again:
        _undo_writes(session)
        current.totals = Totals()
        current.embedded = None
        if has_embeddings(session.task):
            current.embedded = SetEmbeddings(session.task)
        session.metrics.reset()
    _set_state_aside(session)

    # Run its micro-batches, then return to the state before them.
    totals = _totals_with_own_rows(session, name, batches)
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
        sizes.record_success(session.ranks, may_change=True)  # a rank may have seen shapes that are new to others
    _undo_writes(session)

    # Merge the results of all ranks.
    totals = totals.over(session.ranks)
    results = session.metrics.results(session.ranks, functools.partial(stopping.interruptible, session))
    values = results | totals.means(session.ranks) | as_scalars(results)
    current.totals = None
    current.embedded = None
    current.complete = False
    session.metrics.reset()
    if totals.count == 0:
        _warn_nothing_counts(session, name)
    return values


def _totals_of_set(session: Session, name: str, batches: EvalBatches) -> Totals:
    """Run the set's remaining micro-batches. Return this rank's totals of the whole set."""
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    fetched = batches.from_sample(current.totals.samples, session.sizes.evaluation.size, session.ranks)
    with as_evaluated(session.engine, name):
        if not current.complete:  # otherwise one rank alone repeats what follows
            compute = functools.partial(_totals_with, session)
            keep = functools.partial(_keep, session, _per_sample_copies(session))
            each_micro_batch(session, fetched, compute, keep)
            current.complete = True

        # The loss of embeddings compares all of them, so it comes after the last micro-batch.
        if current.embedded is None:
            return current.totals
        return _totals_of_embeddings(session, current.embedded, batches)


def _warn_nothing_counts(session: Session, name: str) -> None:
    set_text = f" of {name}" if name else ""
    session.tracker.warn_once(
        f"evaluation{set_text} at step {session.state.progress.step}: the loss's count is 0 over the whole evaluation "
        "set, so the loss is nan",
        topic=f"nothing counts in evaluation {name}",
    )


def _set_state_aside(session: Session) -> None:
    """Record the state that the evaluation of a set begins with, unless it continues after an error. The weights'
    average takes their place meanwhile, since forwards may write it, too.
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
        work = f"the evaluation at step {session.state.progress.step}"
        session.tracker.warn_once(written_without_copy(work, lost), topic="parameters written in evaluation")


def written_without_copy(work: str, names: Sequence[str]) -> str:
    """Return a warning about parameters whose first write in place cannot be undone.

    Args:
        work: what has written them, such as "the evaluation at step 3".
        names: the parameters.
    """
    return (
        f"{work} is the first to write {listed(names)} in place, of which there was no copy yet (from now on there "
        "is): what it has written stays. Make them buffers, which are always copied"
    )


@contextlib.contextmanager
def as_evaluated(engine: Engine, name: str, work: str = EVALUATION) -> Iterator[None]:
    """Evaluate inside the block: evaluation mode, averaged weights. Restore generators and module modes after it.

    Args:
        engine: with the model.
        name: the evaluation set, which seeds the generators.
        work: names its draws in the record.
    """
    state = engine.state
    snapshot = engine.snapshot
    key = evaluation_key(state.seed, name)
    seed_from(state.device, *key)
    engine.draws_for = (work, key)
    preserved = snapshot.preserved_generators()
    with preserved, state.average.in_place_of_weights(), evaluation_mode(state.modules), snapshot.undone_on_error():
        yield


def each_micro_batch(
    session: Session,
    fetched: Iterable[MicroBatch],
    compute: Callable[[MicroBatch], T],
    keep: Callable[[MicroBatch, T], None],
) -> None:
    """Work on each micro-batch without training it: the loop of evaluation, prediction and generation.

    Use inside `as_evaluated`. Ends early once a signal is heard; at its end all ranks agree on that, and raise Stopped.

    Args:
        session: with the sizes.
        fetched: batches of at most the current size.
        compute: the work on a micro-batch, repeated if it runs out of memory; its results do not count yet.
        keep: takes the result of a complete micro-batch, on all ranks that evaluate together or on none.
    """
    sizes = session.sizes.evaluation
    for micro in sizes.split_all(fetched, session.eval_ranks):
        with session.metrics.undone_on_error():
            # Until the ranks agree, this micro-batch may be repeated: nothing of it counts.
            watching = watched(session, sizes, micro.data, micro.samples)
            with watching, session.engine.sample_draws(micro):
                result = compute(micro)
            session.snapshot.record_written()
            session.eval_ranks.check_peers()  # last chance to repeat a micro-batch

        # From here on it counts.
        keep(micro, result)
        session.snapshot.take()
        signal_here = stopping.stop_heard(session)
        (stop,) = session.eval_ranks.all_reduce_max(signal_here)  # also a vote: what comes next has none
        sizes.record_success(session.eval_ranks)
        if stop:
            break
    stopping.agree_on_stop(session)


def _totals_with(session: Session, micro: MicroBatch) -> Totals:
    """Return the evaluation's totals, including this micro-batch."""
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    task = session.task if current.embedded is None else current.embedded.task
    loss, count, metrics = session.engine.evaluate(task, micro.data)
    metric_sums = evaluate_metrics(metrics, session.metrics.names)
    if micro.real:
        session.metrics.update(metrics)

    # A copy: a loss that is a view would keep its micro-batch's tensors until the evaluation ends.
    return current.totals.plus(loss.clone(), count, metric_sums, micro.samples, micro.real)


def _keep(session: Session, copies: dict[str, torch.Tensor], micro: MicroBatch, totals: Totals) -> None:
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    if copies and not current.totals.samples:
        _require_own_rows(session, copies, micro)
    if current.embedded is not None:
        current.embedded.keep(micro.real)
    current.totals = totals


# --- a row per sample


class SharedRows(Exception):
    """Two samples of an evaluation micro-batch have written the same row of a buffer with a row per sample: they are
    of two time steps, since the set has fewer sequences than the micro-batch has samples.

    Attributes:
        name: of the buffer.
        samples: of the micro-batch.
        rows: that it has written: as many samples can be evaluated at a time.
    """

    def __init__(self, name: str, samples: int, rows: int):
        super().__init__(name, samples, rows)
        self.name = name
        self.samples = samples
        self.rows = rows


def _per_sample_copies(session: Session) -> dict[str, torch.Tensor]:
    """Return copies of the model's `per_sample_buffers`, for the first micro-batch of a set; otherwise none."""
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    if current.totals.samples or current.embedded is not None:
        return {}
    tensors = per_sample_tensors({"model": session.state.model})
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _require_own_rows(session: Session, copies: dict[str, torch.Tensor], micro: MicroBatch) -> None:
    """Raise SharedRows if the first micro-batch of a set has written fewer rows than it has samples. Collective over
    `eval_ranks`.
    """
    global_size = session.config.batch.global_size
    share = -(-global_size // session.ranks.world_size)  # rounded up
    row_counts = {global_size, share}  # a buffer may have rows for either
    tensors = per_sample_tensors({"model": session.state.model})
    for name, copy in copies.items():
        written = 0  # rows
        if name in tensors:
            written = rows_written(copy, tensors[name], row_counts)

        # The ranks agree on the fewest rows that any of them has written.
        missing_here = 0
        if micro.real and 0 < written < micro.samples:
            missing_here = micro.samples - written
        (missing,) = session.eval_ranks.all_reduce_max(missing_here)
        if missing:
            rows = max(1, micro.samples - missing)
            raise SharedRows(name, micro.samples, rows)


def _totals_with_own_rows(session: Session, name: str, batches: EvalBatches) -> Totals:
    """Return `_totals_of_set`, of micro-batches whose samples do not share rows."""
    while True:
        try:
            return _totals_of_set(session, name, batches)
        except SharedRows as shared:
            _begin_with_fewer_samples(session, name, shared)


def _begin_with_fewer_samples(session: Session, name: str, shared: SharedRows) -> None:
    """Return to the start of a set, and let its micro-batches have no more samples than its buffer has rows."""
    _undo_writes(session)
    session.metrics.reset()
    _set_state_aside(session)
    session.sizes.evaluation.limit(shared.rows)
    set_text = f" of {name}" if name else ""
    session.tracker.warn_once(
        f"batch.eval_micro_size={session.config.batch.eval_micro_size}: the first {shared.samples} samples of the "
        f"evaluation{set_text} write to {shared.rows} rows of {shared.name} (per_sample_buffers): the set has "
        f"{shared.rows} sequences, and two time steps of one must not meet in a micro-batch. It is evaluated "
        f"{shared.rows} samples at a time, as batch.eval_micro_size={shared.rows} asks",
        topic=f"rows of {shared.name} in evaluation",
    )


def _totals_of_embeddings(session: Session, embedded: SetEmbeddings, batches: EvalBatches) -> Totals:
    """Return this rank's totals of a set whose batches are embedded.

    Collective on the first call only, so that a retry may run on one rank.
    """
    # The embeddings of all ranks, in global batches as in training.
    global_batches = embedded.gathered(session.ranks, batches.is_stream, session.config.batch.global_size)

    session.metrics.reset()  # drops results of an attempt that ran out of memory
    totals = Totals()
    for start, rows in global_batches:
        if stopping.stop_heard(session):
            break
        watching = watched(session, session.sizes.evaluation, rows, always=True)
        with watching, session.state.precision.autocast:
            seed_from(session.state.device, session.state.seed, start)  # the same on all ranks
            loss, count, metrics = embedded.loss_of(rows, session.state.device)
            metric_sums = evaluate_metrics(metrics, session.metrics.names)
            session.metrics.update(metrics)
        totals = totals.plus(loss.clone(), count, metric_sums)
    stopping.agree_on_stop(session)
    return totals


def record_objective(session: Session, means: dict[str, float]) -> None:
    """Record this evaluation's objective and, if it has a direction, the best so far.

    A value that is not finite is never the best, nor is an evaluation before the first step. Schedules follow
    scheduled evaluations only.
    """
    progress = session.state.progress
    direction, metric = session.objective
    if metric not in means:  # only some batches may have it
        _note_missing_objective(session, means)
    value = means.get(metric, math.nan)

    # The schedule may follow it.
    progress.objective = value
    if session.limits.evaluation_is_scheduled(progress):
        for update in session.state.updates:
            update.schedule.record_objective(value)

    # The best so far selects a checkpoint.
    only_checks = session.config.activity.trains and progress.step == 0
    if direction is None or only_checks or not math.isfinite(value):
        return
    best = progress.best
    if best is None or _is_better(value, best, direction):
        progress.best = value
        progress.best_step = progress.step


def _is_better(value: float, best: float, direction: str) -> bool:
    if direction == "max":
        return value > best
    return value < best


def _note_missing_objective(session: Session, means: dict[str, float]) -> None:
    """Raise UserError if no evaluation has had the objective's metric; otherwise warn that this one has none."""
    progress = session.state.progress
    direction, metric = session.objective
    setting = direction or "auto"
    if progress.objective is None:
        raise no_such_metric("objective", setting, metric, means)
    session.tracker.warn_once(
        f"objective={setting} {metric}: the evaluation at step {progress.step} has no such metric, which counts as "
        f"nan; it has {', '.join(means)}",
        topic="an evaluation without the objective",
    )
