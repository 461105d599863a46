"""Checks before training that the objective is one of the task's metrics."""

import logging

from trainapp.train.evaluate import no_such_metric
from trainapp.train.losses import is_built_in
from trainapp.train.metric_names import metric_names
from trainapp.train.run import Run

NOT_EVALUATED = -1  # as the step of the last evaluation: one is due before the first step
log = logging.getLogger(__name__)


def require_known(run: Run) -> None:
    """Raises UserError for an `objective` that names no metric. Collective.

    The built-in losses have known ones; a task of the user's is called with two samples. A metric that these lack may
    be one that only some batches have: then the run begins with an evaluation, which refuses it or finds it. A run that
    is never evaluated gets a warning.
    """
    objective, progress = run.objective, run.state.progress
    if run.config.mode != "train" or run.config.objective == "auto":
        return
    if run.eval_batches is None or not run.cadences.evaluate:
        reason = "the data has no validation split" if run.eval_batches is None else "every.eval=null"
        log.warning("objective=%s %s: the run is never evaluated (%s), so that it has none", *objective, reason)
        return
    if objective.metric == "loss" or progress.objective is not None:
        return
    known = {"loss", "accuracy"} if is_built_in(run.task) else metric_names(run)
    if objective.metric in known:
        return
    if is_built_in(run.task):
        raise no_such_metric(objective, known)
    if progress.step == 0:
        progress.evaluated_at = NOT_EVALUATED
        log.info("objective=%s %s: not among the metrics of the first samples, so evaluating first", *objective)
