"""Stateful metrics, callbacks and loggers: located, built and tried."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainapp.assembly.probe import is_small
from trainapp.config import excludes, targets
from trainapp.config.schema import Config
from trainapp.data.batch import map_tensors
from trainapp.errors import UserError
from trainapp.hooks.callbacks import EarlyStopping
from trainapp.hooks.metrics import EVERY, StatefulMetrics, logged_name, no_such_metric
from trainapp.hooks.predictions import FirstPredictions
from trainapp.hooks.rungs import RUNGS, AskSweep, asks_sweep
from trainapp.losses import losses
from trainapp.memory.cpu import uncompiled
from trainapp.models.inspect import evaluation_mode
from trainapp.state.contents import Contents
from trainapp.state.snapshot import Parameters
from trainapp.tracking.utilisation import Utilisation, peak_flops
from trainapp.training.engine import Engine
from trainapp.training.evaluation.evaluate import written_without_copy
from trainapp.training.phase import Phase
from trainapp.training.session import Objective, Session

EARLY_STOPPING = "early_stopping"  # the name of the callback that `stopping` builds
EXAMPLE_SAMPLES = 2  # in the batch that tries the metrics; no fewer: the last evaluation batch may be this small
Hooks = dict[str, dict[str, Any]]  # the objects of `metrics`, `callbacks` and `tracker`, by section and name
log = logging.getLogger(__name__)


def load_hooks(config: Config, spec: Mapping[str, Any]) -> Hooks:
    """Build the hooks. Raises UserError with all errors in names and arguments.

    Args:
        config: with the sections of hooks.
        spec: the data's, which fills in parameters such as `num_classes`.
    """
    errors: list[str] = []
    hooks: Hooks = {"metrics": {}, "callbacks": {}, "tracker": {}}

    # Build each object. One that fails does not hide the errors of the next.
    for section, objects in hooks.items():
        for name, node in getattr(config, section).items():
            setting = f"{section}.{name}"
            try:
                hook_class = targets.locate(node.target, f"{setting}._target_", config.user_packages)
                package = getattr(hook_class, "package", None)
                if package:
                    targets.require_package(package, f"{section}={name}")
                objects[name] = targets.construct(hook_class, node.arguments, setting, config.user_packages, dict(spec))
            except UserError as error:
                errors.append(str(error))

    # Names that the application needs itself.
    for name in losses.RESERVED & hooks["metrics"].keys():
        errors.append(f"metrics.{name}: the log itself records this name; choose another one")
    if EARLY_STOPPING in hooks["callbacks"] and config.stopping.patience is not None:
        errors.append(f"callbacks.{EARLY_STOPPING}: stopping.patience adds a callback of this name; choose another one")
    if errors:
        raise UserError("\n".join(errors))
    return hooks


def callbacks_of(config: Config, hooks: Hooks, task: losses.Task, sets: Sequence[str]) -> dict[str, Any]:
    """Return the callbacks: those of `callbacks`; if the run trains, also early stopping (`stopping.patience`) and the
    questions to a sweep.

    Raises UserError if a sweep looks for the opposite of the objective, or for the best where there is none.

    Args:
        config: the run's.
        hooks: from `load_hooks`.
        task, sets: see `Objective.of`.
    """
    objective = Objective.of(config, task, sets)
    _require_objective_of_sweeper(config, objective)
    callbacks = dict(hooks["callbacks"])
    if not config.activity.trains:
        return callbacks

    # Early stopping, by the objective unless a metric is named.
    stopping = config.stopping
    if stopping.patience is not None:
        watched = objective if stopping.metric == "auto" else Objective.parsed(stopping.metric)
        assert watched.direction is not None, "refused by config.excludes"
        callbacks[EARLY_STOPPING] = EarlyStopping(
            stopping.patience, stopping.min_delta, watched.direction, watched.metric
        )

    # A run of a sweep with a pruner asks at each rung whether it may continue.
    run_dir = Path(config.run_dir)
    if asks_sweep(run_dir):
        excludes.require_best(config, "sweep.pruner")
        assert objective.direction is not None
        callbacks[RUNGS] = AskSweep(run_dir, objective.direction, objective.metric)
    return callbacks


def _require_objective_of_sweeper(config: Config, objective: Objective) -> None:
    """Raise UserError if a sweep looks for the opposite of the objective, or for the best where there is none."""
    if not config.sweeper_direction:
        return
    excludes.require_best(config, f"hydra.sweeper.direction={config.sweeper_direction}imize")
    if config.sweeper_direction != objective.direction:
        raise UserError(
            f"hydra.sweeper.direction={config.sweeper_direction}imize: the objective of these runs is "
            f"{objective.direction} {objective.metric}; set hydra.sweeper.direction={objective.direction}imize"
        )


def metrics_of(hooks: Hooks, engine: Engine) -> StatefulMetrics:
    """Return the metrics, on the device, where their states count as memory. Raises UserError for any other object."""
    metrics = StatefulMetrics(hooks["metrics"])
    for metric in hooks["metrics"].values():
        if isinstance(metric, FirstPredictions) and metric.class_dim is None:
            metric.class_dim = losses.class_dim(engine.evaluated_task)
    metrics.to(engine.state.device)
    return metrics


def utilisation_of(config: Config, engine: Engine) -> Utilisation | None:
    """Return the counter of the model's FLOPs, if the device's peak is known and no compiler hides operations."""
    peak = peak_flops(engine.state.device, config.precision.mode, config.train.peak_flops)
    if peak is None or config.train.compile:
        return None
    total_peak = peak * engine.ranks.world_size
    recomputes = config.activation_checkpointing.mode != "none"
    return Utilisation(total_peak, lambda: engine.phase is Phase.BACKWARD, recomputes)


# --- before the first step


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
    contents = Contents(session.state.model, losses.unchecked(session.task))
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
