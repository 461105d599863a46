"""Checks before training that the objective is one of the task's metrics."""

import logging

from trainapp.config.schema import Config
from trainapp.hooks.callbacks import EarlyStopping
from trainapp.train.evaluate import no_such_metric
from trainapp.train.hook_parts import EARLY_STOPPING
from trainapp.train.losses import is_built_in
from trainapp.train.metric_names import metric_names
from trainapp.train.run import Objective, Run

NOT_EVALUATED = -1  # as the step of the last evaluation: one is due before the first step
log = logging.getLogger(__name__)


def require_known(run: Run) -> None:
    """Raises UserError for an `objective` or a `stopping.metric` that names no metric. Collective.

    The built-in losses have known ones; a task of the user's is called with two samples. A metric that these lack may
    be one that only some batches have: then the run begins with an evaluation, which refuses it or finds it. A run that
    is never evaluated gets a warning.
    """
    named, progress = _named(run.config), run.state.progress
    if run.config.mode != "train" or not named:
        return
    if not (run.eval_sets and run.cadences.evaluates):
        reason = "every.eval=null" if run.eval_sets else "the data has no validation split"
        setting, wanted = next(iter(named.items()))
        log.warning("%s=%s %s: the run is never evaluated (%s), so that it has none", setting, *wanted[:2], reason)
        return
    unknown = {name: wanted for name, wanted in named.items() if not _is_configured(run, wanted.metric)}
    if not unknown or progress.objective is not None:
        return
    own = run.metrics.names | ({"loss", "accuracy"} if is_built_in(run.task) else metric_names(run))
    known = {f"{name}/{metric}" if name else metric for name in run.eval_sets for metric in own}
    for setting, wanted in unknown.items():
        if wanted.metric in known:
            _note_known(run, setting)
            continue
        if is_built_in(run.task) or _set_and_metric(run, wanted.metric)[0] not in run.eval_sets:
            raise no_such_metric(wanted, known, setting)
        if progress.step == 0:
            progress.evaluated_at = NOT_EVALUATED
            log.info("%s=%s %s: not among the metrics of the first samples, so evaluating first", setting, *wanted[:2])


def _note_known(run: Run, setting: str) -> None:
    """An evaluation without it gets nan then, the first one too."""
    if setting == "objective":
        run.objective = run.objective._replace(is_known=True)
    stopping = run.config.stopping
    if stopping.patience is not None and (setting == "stopping.metric" or stopping.metric == "auto"):
        early: EarlyStopping = run.callbacks.by_name[EARLY_STOPPING]
        early.is_known = True


def _named(config: Config) -> dict[str, Objective]:
    """The settings that name a metric."""
    given = {"objective": config.objective}
    if config.stopping.patience is not None:
        given["stopping.metric"] = config.stopping.metric
    words = {setting: text.split() for setting, text in given.items() if text != "auto"}
    return {setting: Objective(direction, metric) for setting, (direction, metric) in words.items()}


def _is_configured(run: Run, metric: str) -> bool:
    """Whether it is the loss, or a metric with a state or one of the numbers that such a metric computes."""
    name, own = _set_and_metric(run, metric)
    return name in run.eval_sets and (own == "loss" or own.partition("/")[0] in run.metrics.names)


def _set_and_metric(run: Run, metric: str) -> tuple[str, str]:
    """Of `hard/loss`, the validation set and its metric; of others the data's own split, which may not exist."""
    name, _, own = metric.partition("/")
    return (name, own) if name in run.eval_sets else ("", metric)
