"""Before the first step, whether each metric that is configured takes what the task passes to it.

Otherwise a mistake in its arguments would show at the first evaluation. Costs a forward of two samples per evaluation
set. What cannot be tried is left to the evaluation: a stream, a task that fails on two samples, `compute`.
"""

import contextlib
import logging

import torch

from trainapp.data.eval_stream import EvalStream
from trainapp.data.sampler import EvalBatches
from trainapp.errors import UserError
from trainapp.hooks.metric_failures import MetricFailed
from trainapp.train.attributes import Attributes
from trainapp.train.losses import has_embeddings
from trainapp.train.metric_names import metrics_of, without_trace
from trainapp.train.run import Run

SAMPLES = 2  # which a remainder of an evaluation may have, too
log = logging.getLogger(__name__)


def try_metrics(run: Run) -> None:
    """Update the metrics with the first samples of each evaluation set, and undo that. Raises UserError for a metric
    that refuses them, with its error as the cause. Collective.
    """
    is_evaluated = run.config.mode == "train" and run.eval_sets and run.cadences.evaluates
    if not (is_evaluated and run.metrics.names) or has_embeddings(run.task):  # those get theirs from all embeddings
        return
    indexed = [batches for batches in run.eval_sets.values() if not isinstance(batches, EvalStream)]
    failures = [failed for batches in indexed if batches.samples and (failed := _failure(run, batches))]
    texts = [text for text in run.ranks.all_gather_object(str(failures[0]) if failures else None) if text]
    if texts:
        raise UserError(texts[0]) from (failures[0].__cause__ if failures else None)


def _failure(run: Run, batches: EvalBatches) -> MetricFailed | None:
    with contextlib.ExitStack() as stack:
        stack.callback(Attributes(batches.dataset, numbers_only=True).restore)  # a count of what was read
        stack.enter_context(without_trace(run))
        try:
            run.metrics.try_update(metrics_of(run, batches.example(SAMPLES)))
        except MetricFailed as failed:
            return failed.with_traceback(None)
        except Exception as error:  # the first evaluation shows it, in its place and with its traceback
            log.debug("the metrics cannot be tried: %s", error)
    if run.state.device.type == "cuda":
        torch.cuda.empty_cache()
    return None
