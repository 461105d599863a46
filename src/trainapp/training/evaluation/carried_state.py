"""State that a micro-batch of an evaluation leaves to the next one, so that results depend on where batches are split.

A buffer or a number that a forward writes is state. What it leaves in other attributes may be a result for others to
read, such as attention weights, or state, such as a list of earlier features. The second micro-batch tells, and the
last full one, as such a list may be read once it is long enough: these are evaluated twice, once without what earlier
ones have left.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainapp.data.batch import MicroBatch
from trainapp.losses.losses import MetricSum, evaluate_metrics
from trainapp.optim.precision import Number
from trainapp.rng import preserved_rng
from trainapp.training.dependence import warn_of_writes_in_evaluation
from trainapp.training.session import Session

# Differences up to this share of the values are rounding: some of CUDA's kernels add in another order each time.
_ROUNDING = 1e-5


def record_writes(session: Session, is_first_evaluation: bool) -> None:
    """Record what the first micro-batch of a set has written. Collective over `eval_ranks`.

    Args:
        session: the live objects.
        is_first_evaluation: whether the set is evaluated for the first time in this process: only then are
            micro-batches evaluated twice.
    """
    current = session.evaluation
    current.written = session.snapshot.changed(only_state=True)
    if current.written or not is_first_evaluation or current.embedded is not None:
        may_carry = False
    else:
        current.written = session.snapshot.changed()
        may_carry = bool(current.written)
    (any_may_carry,) = session.eval_ranks.all_reduce_max(may_carry)  # they evaluate it twice together
    current.may_carry = bool(any_may_carry)
    current.is_tried_without = current.may_carry


def precedes_last_full(session: Session, micro: MicroBatch, samples_left: int) -> bool:
    """Return whether the micro-batch after this one is the last full one of the set, on any of the ranks that evaluate
    together. Collective over these.

    Args:
        session: the live objects.
        micro: a complete micro-batch.
        samples_left: after it, of this rank.
    """
    is_next_last = micro.samples <= samples_left < 2 * micro.samples
    (on_any_rank,) = session.eval_ranks.all_reduce_max(is_next_last)
    return bool(on_any_rank)


def evaluate_without_earlier(session: Session, micro: MicroBatch) -> dict[str, float]:
    """Evaluate a micro-batch from the state that its set began with, and undo what that changes and draws.

    Returns: its loss, count and metrics, as numbers.
    """
    before = session.evaluation.before
    assert before is not None, "outside an evaluation"
    undone = session.snapshot.undone()
    draws = session.engine.sample_draws(micro)
    with undone, preserved_rng(session.state.device), draws:
        session.snapshot.return_to(before)
        loss, count, metrics = session.engine.evaluate(session.task, micro.data)
        return as_numbers(loss, count, evaluate_metrics(metrics, session.metrics.names))


def as_numbers(loss: Tensor, count: Number, metrics: Mapping[str, MetricSum]) -> dict[str, float]:
    """Return the results of a micro-batch as numbers, by name."""
    numbers = {"loss": float(loss), "count": float(count)}
    for name, value in metrics.items():
        parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        for index, part in enumerate(parts):
            numbers[f"metric {name}, {index}"] = float(part)
    return numbers


def warn_of_carried_state(
    session: Session, micro: MicroBatch, without: dict[str, float], now: dict[str, float]
) -> None:
    """Warn once if a micro-batch has other results without what earlier ones have left.

    Args:
        session: the live objects.
        micro: a micro-batch after the first.
        without: see `evaluate_without_earlier`.
        now: its results.
    """
    for name, value in now.items():
        if not _is_equal(value, without[name], now["count"]):
            warn_of_writes_in_evaluation(session, session.evaluation.written, micro.samples)
            return


def _is_equal(value: float, other: float, count: float) -> bool:
    """Return whether two results are equal, up to rounding. count: of the loss, whose summands may cancel out."""
    if math.isnan(value) and math.isnan(other):
        return True
    return math.isclose(value, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING * abs(count))
