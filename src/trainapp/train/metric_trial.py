"""Before the first step: each configured metric takes what the task passes to it for two samples.

Otherwise a mistake in its arguments would show at the first evaluation. A task that fails on two samples is left to the
evaluation, and so are streams.
"""

import logging

from trainapp.train.losses import has_embeddings
from trainapp.train.metric_names import metrics_of, without_trace
from trainapp.train.run import Run

SAMPLES = 2  # which a remainder of an evaluation may have, too
log = logging.getLogger(__name__)


def try_metrics(run: Run) -> None:
    """Update the metrics with the first samples of each evaluation set, and reset them. Raises what a metric raises."""
    is_evaluated = run.config.mode == "train" and run.eval_sets and run.cadences.evaluates
    if not (is_evaluated and run.metrics.names) or has_embeddings(run.task):  # those get theirs from all embeddings
        return
    for batches in run.eval_sets.values():
        if batches.is_stream or not batches.samples:
            continue
        with without_trace(run):
            try:
                passed = metrics_of(run, batches.example(SAMPLES))
            except Exception as error:  # the first evaluation shows it in its place
                log.debug("the metrics cannot be tried: %s", error)
                continue
            run.metrics.update(passed)
    run.metrics.reset()
