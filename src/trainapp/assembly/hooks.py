"""Stateful metrics, callbacks and loggers: located, built and tried."""

import logging
from collections.abc import Mapping, Sequence
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
from trainapp.memory.device import uncompiled
from trainapp.models.inspect import evaluation_mode
from trainapp.snapshot import Parameters
from trainapp.tracking.meter import Utilisation, peak_of
from trainapp.training.engine import Engine
from trainapp.training.evaluate import written_without_copy
from trainapp.training.phase import Phase
from trainapp.training.session import Objective, Session

EARLY_STOPPING = "early_stopping"  # the name of the callback that `stopping` builds
SAMPLES = 2  # no fewer: the last evaluation batch may be this small
Hooks = dict[str, dict[str, Any]]  # the objects of `metrics`, `callbacks` and `tracker`, by section and name
log = logging.getLogger(__name__)


def load_hooks(config: Config, spec: Mapping[str, Any]) -> Hooks:
    """Build the hooks. spec: the data's, which fills in parameters such as `num_classes`. Raises UserError with all
    errors in names and arguments.
    """
    errors: list[str] = []
    hooks: Hooks = {"metrics": {}, "callbacks": {}, "tracker": {}}
    for group, built in hooks.items():
        for name, node in getattr(config, group).items():
            setting = f"{group}.{name}"
            try:
                kind = targets.locate(node.target, f"{setting}._target_", config.user_packages)
                if package := getattr(kind, "package", None):
                    targets.require_package(package, f"{group}={name}")
                built[name] = targets.construct(kind, node.arguments, setting, config.user_packages, dict(spec))
            except UserError as error:
                errors.append(str(error))
    for name in losses.RESERVED & hooks["metrics"].keys():
        errors.append(f"metrics.{name}: the log itself records this name; choose another one")
    if EARLY_STOPPING in hooks["callbacks"] and config.stopping.patience is not None:
        errors.append(f"callbacks.{EARLY_STOPPING}: stopping.patience adds a callback of this name; choose another one")
    if errors:
        raise UserError("\n".join(errors))
    return hooks


def callbacks_of(config: Config, hooks: Hooks, task: losses.Task, sets: Sequence[str]) -> dict[str, Any]:
    """The callbacks, including early stopping if `stopping.patience` is set and the run trains, and the questions to a
    sweep. task, sets: see `Objective.of`. Raises UserError if a sweep looks for the opposite, or for the best where
    there is none.
    """
    found, stopping, goal = dict(hooks["callbacks"]), config.stopping, Objective.of(config, task, sets)
    if config.sweeper_direction:
        excludes.require_best(config, f"hydra.sweeper.direction={config.sweeper_direction}imize")
    if config.sweeper_direction not in ("", goal.direction):
        raise UserError(
            f"hydra.sweeper.direction={config.sweeper_direction}imize: the objective of these runs is "
            f"{goal.direction} {goal.metric}; set hydra.sweeper.direction={goal.direction}imize"
        )
    if config.activity.trains and stopping.patience is not None:
        watched = goal if stopping.metric == "auto" else Objective.parsed(stopping.metric)
        assert watched.direction is not None, "refused by config.excludes"
        found[EARLY_STOPPING] = EarlyStopping(stopping.patience, stopping.min_delta, watched.direction, watched.metric)
    if config.activity.trains and asks_sweep(Path(config.run_dir)):
        excludes.require_best(config, "sweep.pruner")
        assert goal.direction is not None
        found[RUNGS] = AskSweep(Path(config.run_dir), goal.direction, goal.metric)
    return found


def metrics_of(hooks: Hooks, engine: Engine) -> StatefulMetrics:
    """The metrics, on the device, where their states count as memory. Raises UserError for any other object."""
    metrics = StatefulMetrics(hooks["metrics"])
    for metric in hooks["metrics"].values():
        if isinstance(metric, FirstPredictions) and metric.class_dim is None:
            metric.class_dim = losses.class_dim(engine.evaluated_task)
    metrics.to(engine.state.device)
    return metrics


def utilisation_of(config: Config, engine: Engine) -> Utilisation | None:
    """The counter of the model's FLOPs, if the device's peak is known and no compiler hides operations; else None."""
    peak = peak_of(engine.state.device, config.precision.mode, config.train.peak_flops)
    if peak is None or config.train.compile:
        return None
    recomputes = config.activation_checkpointing.mode != "none"
    return Utilisation(peak * engine.ranks.world_size, lambda: engine.phase is Phase.BACKWARD, recomputes)


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
    if not (session.eval_sets and any(session.limits.evaluate)):
        _do_without_evaluations(session)
        return
    is_built_in = losses.is_built_in(session.task)
    found = {"loss", "accuracy"} if is_built_in else {"loss"}
    if not losses.has_embeddings(session.task) and (session.metrics.names or not is_built_in):
        found |= _tried(session)
    if session.state.progress.objective is None:  # never evaluated before
        _require_known(session, found | session.metrics.names)


def _do_without_evaluations(session: Session) -> None:
    """Raises UserError for a setting that would have no effect without evaluations."""
    config = session.config
    why = "every.eval=null" if session.eval_sets else f"data={config.data.target} has no validation split"
    follows = {
        f"schedule._target_={config.schedule.target}": session.state.updates[0].schedule.follows_evaluations,
        f"stopping.patience={config.stopping.patience}": config.stopping.patience is not None,
    }
    if needing := " and ".join(setting for setting, needs in follows.items() if needs):
        raise UserError(f"{needing}: it follows evaluations, but {why}; enable them, or leave the setting out")
    if config.objective != "auto":
        log.warning("objective=%s: the run is never evaluated, so its result has no objective", config.objective)


def _tried(session: Session) -> set[str]:
    """The names of the metrics that the task has for the first samples, on any rank. Collective."""
    found: set[str] = set()
    parameters: Parameters = "all" if is_small(*session.state.modules) else "written"
    session.ranks.enable_votes(False)
    for batches in session.eval_sets.values():
        if batches.is_stream or not batches.samples:
            continue
        with torch.no_grad(), session.snapshot.undone(parameters), uncompiled(), evaluation_mode(session.state.modules):
            try:
                batch = map_tensors(lambda tensor: tensor.to(session.state.device), batches.example(SAMPLES))
                _, _, metrics = session.engine.evaluate(session.task, batch)
                if session.strategy.forward_is_collective:
                    session.strategy.finish_accumulation()
            except Exception as error:  # the first evaluation raises it again
                log.debug("the metrics cannot be tried: %s", error)
                continue
            session.metrics.update(metrics)
        if session.snapshot.lost:
            log.warning("%s", written_without_copy("the first trial of the metrics", session.snapshot.lost))
        found |= {"loss", *metrics} - {EVERY}
    found = found.union(*session.ranks.all_gather_object(found))
    if found:  # else no rank could try
        session.metrics.require_updates(session.ranks)
    session.metrics.reset()
    return found


def _require_known(session: Session, found: set[str]) -> None:
    config, progress = session.config, session.state.progress
    known = {logged_name(name, metric) for name in session.eval_sets for metric in found}
    named = {"objective": config.objective}
    if config.stopping.patience is not None:
        named["stopping.metric"] = config.stopping.metric
    for setting, text in named.items():
        if text == "auto":
            continue
        direction, metric = text.split()
        owner = metric.rpartition("/")[0]  # `per_class/3` is a value of the metric per_class
        if metric in known or (owner in known and owner.rpartition("/")[2] in session.metrics.names):
            continue
        if losses.is_built_in(session.task):
            raise no_such_metric(setting, direction, metric, known)
        if progress.step == 0:
            progress.evaluated_at = -1  # makes an evaluation due before the first step
            log.info("%s=%s: not among the metrics of the first samples, so evaluating first", setting, text)
