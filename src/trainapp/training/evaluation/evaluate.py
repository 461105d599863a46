"""Evaluation: every evaluation set in turn, each sample once."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from trainapp.data.batch import MicroBatch
from trainapp.data.eval_batches import EvalBatches
from trainapp.hooks.metrics import as_scalars, logged_name
from trainapp.losses.losses import evaluate_metrics, has_embeddings, needs_no_check
from trainapp.losses.set_embeddings import SetEmbeddings
from trainapp.parallel.ranks import SingleRank
from trainapp.rng import seed_from
from trainapp.signals import Stopped
from trainapp.training import callback_calls, stopping
from trainapp.training.dependence import warn_of_writes_in_evaluation
from trainapp.training.engine import Totals
from trainapp.training.evaluation.carried_state import (
    as_numbers,
    evaluate_without_earlier,
    precedes_last_full,
    record_writes,
    warn_of_carried_state,
)
from trainapp.training.evaluation.half_batch import try_half
from trainapp.training.evaluation.loop import as_evaluated, each_micro_batch
from trainapp.training.evaluation.objective import record_objective
from trainapp.training.evaluation.own_rows import (
    RowsOfRanks,
    SharedRows,
    are_rows_of_positions,
    per_sample_copies,
    require_own_rows,
    rows_of_several_ranks,
)
from trainapp.training.memory_watch import begin_counting_refused, watched
from trainapp.training.phase import Phase
from trainapp.training.session import Evaluation, Session
from trainapp.units import listed, plural

ACCURACY = "accuracy"  # the metric that is at most 1, however it is computed


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
    undo_writes(session)
    session.evaluation = Evaluation(last=session.evaluation.last)


def _record_results(session: Session) -> None:
    """Log the results of all sets, record the objective and call the callbacks."""
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
    callback_calls.call(session, "after_evaluation", values)


def evaluate_set(session: Session, name: str, batches: EvalBatches) -> dict[str, Any]:
    """Evaluate all samples of one set. Return its metrics by name, and results of stateful metrics. Collective."""
    sizes = session.sizes.evaluation
    current = session.evaluation
    autotuner = session.sizes.autotuner
    tunes = autotuner is not None and autotuner.follow(sizes, sizes.shape_is_steady)

    # Make the ranks equal; skipped on a retry, which may run on one rank only.
    if current.totals is None:
        # Each rank validates its size on its own batches, whose number differs: agree once.
        votes = session.ranks.all_gather_object(tunes or sizes.is_unvalidated)
        session.ranks.enable_votes(any(votes))
        # Rows of a rank's own samples would be lost to training.
        session.strategy.broadcast_buffers(except_for=session.state.sample_rows.names)

    # Begin the set, or begin it again.
    must_begin_again = batches.is_stream and not current.complete  # a stream is read from its start
    if current.totals is None or must_begin_again:
        undo_writes(session)
        current.totals = Totals()
        current.embedded = None
        if has_embeddings(session.task):
            current.embedded = SetEmbeddings(session.task)
        current.rows_before = per_sample_copies(session)
        session.metrics.reset()
    set_state_aside(session)

    # Run its micro-batches, then return to the state before them.
    totals = _totals_with_own_rows(session, name, batches)
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
        sizes.record_success(session.ranks, may_change=True)  # a rank may have seen shapes that are new to others
    shared_rows = rows_of_several_ranks(session) if batches.is_shared else None
    undo_writes(session)
    if shared_rows is not None and not _may_be_shared(session, name, batches, shared_rows):
        _finish_set(session)
        batches.read_all()
        return evaluate_set(session, name, batches)  # again, each rank by itself

    values = _results_of_set(session, name, totals, batches)
    _finish_set(session)
    return values


def _results_of_set(session: Session, name: str, totals: Totals, batches: EvalBatches) -> dict[str, Any]:
    """Return the metrics of a set, and results of stateful metrics, equal on every rank. Collective."""
    # Merge the results of all ranks, unless each has those of the whole set.
    ranks = session.ranks if batches.is_shared else SingleRank()
    totals = totals.over(ranks)
    if totals.count == 0:
        _warn_nothing_counts(session, name)
    results = session.metrics.results(ranks, functools.partial(stopping.interruptible, session))
    numbers = totals.means(ranks) | as_scalars(results)
    if not batches.is_shared:
        numbers = session.ranks.all_gather_object(numbers)[0]  # the last bits may differ between ranks
    if numbers.get(ACCURACY, 0.0) > 1:
        _warn_of_accuracy_above_1(session, name, totals, numbers[ACCURACY])
    return results | numbers


def _finish_set(session: Session) -> None:
    """Forget what was noted for the set that has been evaluated."""
    current = session.evaluation
    current.totals = None
    current.embedded = None
    current.complete = False
    current.written = ()
    current.may_carry = False
    current.is_tried_without = False
    current.rows_before = {}
    session.metrics.reset()


def _totals_with_own_rows(session: Session, name: str, batches: EvalBatches) -> Totals:
    """Return `_totals_of_set`, of micro-batches whose samples do not share rows."""
    while True:
        try:
            return _totals_of_set(session, name, batches)
        except SharedRows as shared:
            _begin_with_fewer_samples(session, name, shared)


def _begin_with_fewer_samples(session: Session, name: str, shared: SharedRows) -> None:
    """Return to the start of a set, and let its micro-batches have no more samples than its buffer has rows."""
    undo_writes(session)
    session.metrics.reset()
    set_state_aside(session)
    session.sizes.evaluation.set_limit(shared.rows)
    set_text = f" of {name}" if name else ""
    has_text = "the set has" if session.ranks.world_size == 1 else "a rank's share of the set has"
    session.tracker.warn_once(
        f"batch.eval_micro_size={session.config.batch.eval_micro_size}: the first {shared.samples} samples of the "
        f"evaluation{set_text} write to {shared.rows} rows of {shared.name} (per_sample_buffers): {has_text} "
        f"{plural(shared.rows, 'sequence')}, and two time steps of one must not meet in a micro-batch. It is evaluated "
        f"{plural(shared.rows, 'sample')} at a time, as batch.eval_micro_size={shared.rows} asks",
        topic=f"rows of {shared.name} in evaluation",
    )


def _may_be_shared(session: Session, name: str, batches: EvalBatches, shared: RowsOfRanks) -> bool:
    """Return whether the ranks may share a set although they write the same rows, and warn if not. Collective."""
    set_text = f" of {name}" if name else ""
    shared_text = f"the ranks write the same rows of {shared.name} (per_sample_buffers) in the evaluation{set_text}"

    def compute(micro: MicroBatch) -> None:
        session.engine.evaluate(session.task, micro.data)

    by_position = are_rows_of_positions(session, name, batches, shared, compute)
    if by_position is None:
        session.tracker.warn_once(
            f"{shared_text}, one sample at a time, which does not show whether a row is that of a sequence or of a "
            "place in the micro-batch. The result is right only if each rank has sequences of its own, so if their "
            "number is a multiple of that of the ranks; otherwise evaluate with parallel=single",
            topic=f"rows of {shared.name} of several ranks{set_text}",
        )
        return True
    if not by_position:
        world_size = session.ranks.world_size
        session.tracker.warn_once(
            f"{shared_text}: time steps of one sequence are on several ranks, as where {world_size} ranks do not "
            "divide the number of sequences. So every rank evaluates the whole set by itself, which takes up to "
            f"{world_size} times as long: with a multiple of {world_size} sequences in a stream, they share it",
            topic=f"rows of {shared.name} of several ranks{set_text}",
        )
    return by_position


def _totals_of_set(session: Session, name: str, batches: EvalBatches) -> Totals:
    """Run the set's remaining micro-batches. Return this rank's totals of the whole set."""
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    fetched = batches.from_sample(current.totals.samples, session.sizes.evaluation.size, session.ranks)
    with as_evaluated(session.engine, name):
        if not current.complete:  # otherwise one rank alone repeats what follows
            compute = functools.partial(_totals_with, session)
            keep = functools.partial(_keep, session, name, batches)
            each_micro_batch(session, fetched, compute, keep)
            current.complete = True

        # The loss of embeddings compares all of them, so it comes after the last micro-batch.
        if current.embedded is None:
            return current.totals
        return _totals_of_embeddings(session, current.embedded, batches)


def _totals_with(session: Session, micro: MicroBatch) -> Totals:
    """Return the evaluation's totals, including this micro-batch."""
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    # Tried first, while no outputs are in memory.
    checks_samples = session.metrics.awaits_samples_first and _may_lack_samples_first(session)
    if checks_samples:
        try_half(session, micro, functools.partial(_require_samples_first, session))

    without_earlier = None
    if current.is_tried_without:
        without_earlier = evaluate_without_earlier(session, micro)

    task = session.task if current.embedded is None else current.embedded.task
    loss, count, metrics = session.engine.evaluate(task, micro.data)
    if checks_samples:
        session.metrics.require_samples_first(metrics, micro.samples)
    metric_sums = evaluate_metrics(metrics, session.metrics.names)
    if without_earlier is not None and micro.real:
        warn_of_carried_state(session, micro, without_earlier, as_numbers(loss, count, metric_sums))
    if micro.real:
        session.metrics.update(metrics)

    # A copy: a loss that is a view would keep its micro-batch's tensors until the evaluation ends.
    return current.totals.plus(loss.clone(), count, metric_sums, micro.samples, micro.real)


def _may_lack_samples_first(session: Session) -> bool:
    """Return whether another dimension may come first in what the task returns for metrics. Embeddings have the samples
    first; and each call collects them, also a trial.
    """
    return session.evaluation.embedded is None and not needs_no_check(session.task, session.state.model)


def _require_samples_first(session: Session, micro: MicroBatch) -> None:
    """Evaluate a batch for what its task returns for metrics. Raises UserError as `StatefulMetrics` does."""
    _, _, metrics = session.engine.evaluate(session.task, micro.data)
    session.metrics.require_samples_first(metrics, micro.samples)


def _keep(session: Session, name: str, batches: EvalBatches, micro: MicroBatch, totals: Totals) -> None:
    """Take the totals of a complete micro-batch.

    Args:
        session: the live objects.
        name: the set's name.
        batches: of the set. Those of a stream may be time steps of sequences, over which state is carried by design.
        micro: the micro-batch.
        totals: those of the set, including it.
    """
    current = session.evaluation
    assert current.totals is not None, "outside an evaluation"
    is_first = not current.totals.samples
    if is_first:
        require_own_rows(session, micro)

    # State that the first micro-batch writes and a later one may read.
    if is_first:
        if not batches.is_stream:
            record_writes(session, name not in session.evaluated_sets)
    else:
        if current.written and not current.may_carry and micro.real:
            warn_of_writes_in_evaluation(session, current.written, micro.samples)
        if not current.may_carry:
            current.written = ()
        session.evaluated_sets.add(name)
        samples_left = batches.end - batches.start - totals.samples
        current.is_tried_without = current.may_carry and precedes_last_full(session, micro, samples_left)
    if current.embedded is not None:
        current.embedded.keep(micro.real)
    session.metrics.awaits_samples_first = False
    current.totals = totals


def _totals_of_embeddings(session: Session, embedded: SetEmbeddings, batches: EvalBatches) -> Totals:
    """Return this rank's totals of a set whose batches are embedded.

    Collective on the first call only, so that a retry may run on one rank.
    """
    # The embeddings of all ranks, in global batches as in training.
    global_batches = embedded.gathered(session.ranks, batches.is_stream, session.config.batch.global_size)

    session.metrics.reset()  # drops results of an attempt that ran out of memory
    totals = Totals()
    for start, rows in global_batches:
        if stopping.stop_requested(session):
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


def _warn_nothing_counts(session: Session, name: str) -> None:
    set_text = f" of {name}" if name else ""
    session.tracker.warn_once(
        f"evaluation{set_text} at step {session.state.progress.step}: the loss's count is 0 over the whole evaluation "
        "set, so the loss is nan",
        topic=f"nothing counts in evaluation {name}",
    )


def _warn_of_accuracy_above_1(session: Session, name: str, totals: Totals, accuracy: float) -> None:
    """Warn once if an accuracy counts right samples, but is divided by less than their number; not of percentages.

    Args:
        session: the live objects.
        name: the set's name.
        totals: of the set; metrics are this rank's.
        accuracy: of all ranks.
    """
    metric_sum, divisor = map(float, totals.metrics.get(ACCURACY, (0, 0)))
    if divisor < metric_sum <= totals.samples:
        session.tracker.warn_once(
            f"evaluation at step {session.state.progress.step}: the {logged_name(name, ACCURACY)} is {accuracy:.4g}: "
            f"{metric_sum:g} of {totals.samples} samples, divided by a count of {divisor:g}. If the count is a sum of "
            "weights, return a tuple of the number of right samples and its own count, such as (right.sum(), "
            "len(right))",
            topic=f"accuracy above 1 in evaluation {name}",
        )


# --- what forwards in evaluation write


def set_state_aside(session: Session) -> None:
    """Record the state that the evaluation of a set begins with, unless it continues after an error. The weights'
    average takes their place meanwhile, since forwards may write it, too.
    """
    if session.evaluation.before is None:
        with session.state.average.in_place_of_weights():
            session.evaluation.before = session.snapshot.set_aside()


def undo_writes(session: Session) -> None:
    """Return to the state that was set aside, if any: training does not depend on what forwards in evaluation write."""
    if session.evaluation.before is None:
        return
    with session.state.average.in_place_of_weights():
        lost = session.snapshot.return_to(session.evaluation.before)
    session.evaluation.before = None
    is_kept = session.config.activity.trains or len(session.eval_sets) > 1  # for training, or for the next set
    if lost and is_kept:
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
