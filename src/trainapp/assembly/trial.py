"""Before the first step, a run's metrics are tried on two samples of each evaluation set: whether each takes what the
task passes to it, and whether the task has the one that is named as the objective.

Otherwise a mistake in them would show at the first evaluation. What cannot be tried is left to that: a stream, a task
that fails on two samples, `compute`.
"""

import logging
from typing import Any

import torch

from trainapp.assembly.checks import uncompiled
from trainapp.assembly.hook_parts import EARLY_STOPPING
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors
from trainapp.hooks.callbacks import EarlyStopping
from trainapp.hooks.metrics import EVERY
from trainapp.losses.losses import has_embeddings, is_built_in
from trainapp.training.evaluate import no_such_metric
from trainapp.training.session import Objective, Session

SAMPLES = 2  # which a remainder of an evaluation may have, too
NOT_EVALUATED = -1  # as the step of the last evaluation: one is due before the first step
log = logging.getLogger(__name__)


def try_metrics(session: Session) -> None:
    """Raises what a metric raises for the first samples of an evaluation set, and UserError for an `objective` or a
    `stopping.metric` that names no metric. Collective.

    A metric that the first samples lack may be one that only some batches have: then the run begins with an evaluation,
    which refuses it or has it. A run that is never evaluated gets a warning.
    """
    if session.config.mode != "train":
        return
    named = _named(session.config)
    if not (session.eval_sets and session.limits.evaluates):
        reason = "every.eval=null" if session.eval_sets else "the data has no validation split"
        for setting, wanted in list(named.items())[:1]:
            log.warning("%s=%s %s: the run is never evaluated (%s), so that it has none", setting, *wanted[:2], reason)
        return
    unknown = {name: wanted for name, wanted in named.items() if not _is_configured(session, wanted.metric)}
    needs_names = bool(unknown) and session.state.progress.objective is None
    names = {"loss", "accuracy"} if is_built_in(session.task) else {"loss"}
    if not has_embeddings(session.task) and (session.metrics.names or (needs_names and not is_built_in(session.task))):
        names |= _tried(session)
    if needs_names:
        _require_known(session, unknown, session.metrics.names | names)


def _tried(session: Session) -> set[str]:
    """Update the metrics with the first samples of each evaluation set, and undo that. Returns the names of the metrics
    that the task has for them, on any rank.
    """
    names: set[str] = set()
    for batches in session.eval_sets.values():
        if batches.is_stream or not batches.samples:
            continue
        with torch.no_grad(), session.snapshot.undone(), uncompiled():
            try:
                metrics = _metrics_of(session, batches.example(SAMPLES))
            except Exception as error:  # the first evaluation shows it in its place
                log.debug("the metrics cannot be tried: %s", error)
                continue
            session.metrics.update(metrics)
        names |= {*metrics} - {EVERY}
    session.metrics.reset()
    return set().union(*session.ranks.all_gather_object(names))


def _metrics_of(session: Session, batch: Any) -> Any:
    """What the task returns as metrics for a batch. Collective with FSDP."""
    for module in (session.state.model, *session.state.stateful.modules.values()):
        module.eval()
    batch = map_tensors(lambda tensor: tensor.to(session.state.device), batch)
    session.ranks.enable_votes(False)
    with session.state.precision.autocast:
        _, _, metrics = session.strategy.evaluate(session.task, batch)
    if session.strategy.forward_is_collective:
        session.strategy.finish_accumulation()
    return metrics


def _require_known(session: Session, unknown: dict[str, Objective], metrics: set[str] | frozenset[str]) -> None:
    known = {f"{name}/{metric}" if name else metric for name in session.eval_sets for metric in metrics}
    for setting, wanted in unknown.items():
        if wanted.metric in known:
            _note_known(session, setting)
            continue
        if is_built_in(session.task) or _set_and_metric(session, wanted.metric)[0] not in session.eval_sets:
            raise no_such_metric(wanted, known, setting)
        if session.state.progress.step == 0:
            session.state.progress.evaluated_at = NOT_EVALUATED
            log.info("%s=%s %s: not among the metrics of the first samples, so evaluating first", setting, *wanted[:2])


def _note_known(session: Session, setting: str) -> None:
    """An evaluation without it gets nan then, the first one too."""
    if setting == "objective":
        session.objective = session.objective._replace(is_known=True)
    stopping = session.config.stopping
    if stopping.patience is not None and (setting == "stopping.metric" or stopping.metric == "auto"):
        early: EarlyStopping = session.callbacks.by_name[EARLY_STOPPING]
        early.is_known = True


def _named(config: Config) -> dict[str, Objective]:
    """The settings that name a metric."""
    given = {"objective": config.objective}
    if config.stopping.patience is not None:
        given["stopping.metric"] = config.stopping.metric
    words = {setting: text.split() for setting, text in given.items() if text != "auto"}
    return {setting: Objective(direction, metric) for setting, (direction, metric) in words.items()}


def _is_configured(session: Session, metric: str) -> bool:
    """Whether it is the loss, or a metric with a state or one of the numbers that such a metric computes."""
    name, own = _set_and_metric(session, metric)
    return name in session.eval_sets and (own == "loss" or own.partition("/")[0] in session.metrics.names)


def _set_and_metric(session: Session, metric: str) -> tuple[str, str]:
    """Of `hard/loss`, the validation set and its metric; of others the data's own split, which may not exist."""
    name, _, own = metric.partition("/")
    return (name, own) if name in session.eval_sets else ("", metric)
