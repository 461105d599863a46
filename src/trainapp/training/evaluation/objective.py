"""The objective of an evaluation: the schedule may follow it, and the best so far selects a checkpoint."""

import math

from trainapp.hooks.metrics import no_such_metric
from trainapp.training.session import Session


def record_objective(session: Session, means: dict[str, float]) -> None:
    """Record this evaluation's objective and, if it has a direction, the best so far.

    A value that is not finite is never the best, nor is an evaluation before the first step. `mode=eval` keeps the best
    of the run, whose checkpoint it does not choose. Schedules follow scheduled evaluations only.
    """
    progress = session.state.progress
    direction, metric = session.objective
    if metric not in means:  # only some batches may have it
        _require_known_objective(session, means)
    value = means.get(metric, math.nan)

    # The schedule may follow it.
    progress.objective = value
    if session.limits.evaluation_is_scheduled(progress):
        for update in session.state.updates:
            update.schedule.record_objective(value)

    # The best so far selects a checkpoint.
    selects = session.config.activity.trains and progress.step > 0
    if direction is None or not selects or not math.isfinite(value):
        return
    best = progress.best
    if best is None or _is_better(value, best, direction):
        progress.best = value
        progress.best_step = progress.step


def _is_better(value: float, best: float, direction: str) -> bool:
    if direction == "max":
        return value > best
    return value < best


def _require_known_objective(session: Session, means: dict[str, float]) -> None:
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
