"""A trial update of the stateful metrics, before the first step."""

import logging
from collections.abc import Collection

import torch

from trainapp.data.batch import map_tensors
from trainapp.errors import UserError
from trainapp.hooks.metrics import EVERY, logged_name, no_such_metric
from trainapp.losses import losses
from trainapp.memory.cpu import uncompiled
from trainapp.models.inspect import evaluation_mode
from trainapp.state.contents import Contents
from trainapp.state.snapshot import Parameters
from trainapp.training.evaluation.evaluate import written_without_copy
from trainapp.training.session import Session
from trainapp.trials.probe import is_small

EXAMPLE_SAMPLES = 2  # in the batch that tries the metrics; no fewer: the last evaluation batch may be this small
log = logging.getLogger(__name__)


def try_metrics(session: Session) -> None:
    """Update the metrics with two samples of each evaluation set, and undo that: errors in them would otherwise surface
    only at the first evaluation. Streams, and tasks that fail on so few samples, are skipped.

    Raises errors of the metrics, and UserError if a built-in task does not have the metric named by `objective` or
    `stopping.metric`. Any other task may have it only for other samples: the run then starts with an evaluation, which
    reports it if it is missing. Collective.
    """
    config = session.config
    if not config.activity.trains:
        return
    is_evaluated = session.eval_sets and any(session.limits.evaluate)
    if not is_evaluated:
        _refuse_settings_that_need_evaluations(session)
        return

    # A built-in task's metrics are known by name. A trial is worth its time only where objects or own tasks may fail.
    is_built_in = losses.is_built_in(session.task)
    names = {"loss", "accuracy"} if is_built_in else {"loss"}
    if not losses.has_embeddings(session.task) and (session.metrics.names or not is_built_in):
        names |= _try_on_examples(session)
    if session.state.progress.objective is None:  # never evaluated before
        _require_named_metrics(session, names | session.metrics.names)


def _refuse_settings_that_need_evaluations(session: Session) -> None:
    """Raise UserError for a setting that would have no effect without evaluations."""
    config = session.config
    settings = []
    if session.state.updates[0].schedule.follows_evaluations:
        settings.append(f"schedule._target_={config.schedule.target}")
    if config.stopping.patience is not None:
        settings.append(f"stopping.patience={config.stopping.patience}")
    if settings:
        why = "every.eval=null" if session.eval_sets else f"data={config.data.target} has no validation split"
        raise UserError(
            f"{' and '.join(settings)}: it follows evaluations, but {why}; enable them, or leave the setting out"
        )
    if config.objective != "auto":
        log.warning("objective=%s: the run is never evaluated, so its result has no objective", config.objective)


def _try_on_examples(session: Session) -> set[str]:
    """Update the metrics with examples, and undo that. Return the names of the metrics that the task has for them, on
    any rank. Collective.
    """
    modules = session.state.modules
    names: set[str] = set()
    copied: Parameters = "all" if is_small(*modules) else "written"
    contents = Contents(model=session.state.model, task=losses.unchecked(session.task))
    session.ranks.enable_votes(False)

    # Each rank by itself: one that fails here continues with the next set.
    for batches in session.eval_sets.values():
        if batches.is_stream or not batches.samples:
            continue
        with torch.no_grad(), session.snapshot.undone(copied), uncompiled(), evaluation_mode(modules):
            try:
                batch = map_tensors(lambda tensor: tensor.to(session.state.device), batches.example(EXAMPLE_SAMPLES))
                _, _, metrics = session.engine.evaluate(session.task, batch)
                if session.strategy.forward_is_collective:
                    session.strategy.finish_accumulation()
            except Exception as error:  # the first evaluation raises it again
                log.debug("the metrics cannot be tried: %s", error)
                continue
            finally:
                contents.restore()
            session.metrics.require_samples_first(metrics, min(EXAMPLE_SAMPLES, batches.samples))
            session.metrics.update(metrics)
        if session.snapshot.lost:
            log.warning("%s", written_without_copy("the first trial of the metrics", session.snapshot.lost))
        names |= {"loss", *metrics} - {EVERY}

    names = names.union(*session.ranks.all_gather_object(names))
    if names:  # else no rank could try
        session.metrics.require_updates(session.ranks)
    session.metrics.reset()
    return names


def _require_named_metrics(session: Session, names: set[str]) -> None:
    """Raise UserError if a built-in task does not have a metric that a setting names. For any other task, start with an
    evaluation.

    Args:
        session: the run's.
        names: of the metrics that the task has for each evaluation set, as far as is known.
    """
    config = session.config
    progress = session.state.progress

    # Settings name metrics as the log does: with the name of the evaluation set.
    logged_names: set[str] = set()
    for set_name in session.eval_sets:
        logged_names.update(logged_name(set_name, metric) for metric in names)
    settings = {"objective": config.objective}
    if config.stopping.patience is not None:
        settings["stopping.metric"] = config.stopping.metric

    for setting, text in settings.items():
        if text == "auto":
            continue
        direction, metric = text.split()
        if metric in logged_names or _is_value_of_metric(metric, logged_names, session.metrics.names):
            continue
        if losses.is_built_in(session.task):
            raise no_such_metric(setting, direction, metric, logged_names)
        if progress.step == 0:
            progress.evaluated_at = -1  # makes an evaluation due before the first step
            log.info("%s=%s: not among the metrics of the first samples, so evaluating first", setting, text)


def _is_value_of_metric(name: str, logged_names: set[str], metric_names: Collection[str]) -> bool:
    """Return whether the name is one of several values of a metric, as `per_class/3` of the metric per_class."""
    parent = name.rpartition("/")[0]
    return parent in logged_names and parent.rpartition("/")[2] in metric_names
