"""Stateful metrics, callbacks and loggers: located and built."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainapp.config import excludes, targets
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.hooks.callbacks import EarlyStopping
from trainapp.hooks.metrics import StatefulMetrics
from trainapp.hooks.predictions import FirstPredictions
from trainapp.hooks.rungs import RUNGS, AskSweep, asks_sweep
from trainapp.losses import losses
from trainapp.training.engine import Engine
from trainapp.training.session import Objective

EARLY_STOPPING = "early_stopping"  # the name of the callback that `stopping` builds
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
