"""Metrics with a state, callbacks and loggers of the tracker: found by their names, built, and checked."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.config import targets
from trainapp.config.schema import Config, Target
from trainapp.errors import UserError
from trainapp.hooks.callbacks import Callbacks, EarlyStopping
from trainapp.hooks.confusion import Counts
from trainapp.hooks.metrics import StatefulMetrics
from trainapp.hooks.predictions import FirstPredictions
from trainapp.losses import losses
from trainapp.parallel.strategy import local
from trainapp.stateful import held_tensors
from trainapp.torch_private import storage_id
from trainapp.tracking.meter import Utilisation, peak_of
from trainapp.training.session import Objective, Phase, Session

EARLY_STOPPING = "early_stopping"  # the name of the callback that `stopping` builds


@dataclass
class Hooks:
    """By name: the objects that `metrics`, `callbacks` and `tracker` name."""

    metrics: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    loggers: dict[str, Any] = field(default_factory=dict)


def load_hooks(config: Config, spec: Mapping[str, Any]) -> Hooks:
    """spec: of the data, from which parameters such as `num_classes` are filled in. Raises UserError with all mistakes
    in names and arguments.
    """
    errors: list[str] = []
    hooks = Hooks()
    sections: tuple[tuple[str, Mapping[str, Target], dict[str, Any]], ...] = (
        ("metrics", config.metrics, hooks.metrics),
        ("callbacks", config.callbacks, hooks.callbacks),
        ("tracker", config.tracker, hooks.loggers),
    )
    for group, nodes, built in sections:
        for name, node in nodes.items():
            setting = f"{group}.{name}"
            try:
                kind = targets.locate(node.target, f"{setting}._target_", config.user_packages)
                if package := getattr(kind, "package", None):
                    targets.require_package(package, f"{group}={name}")
                built[name] = targets.construct(kind, node.arguments, setting, config.user_packages, dict(spec))
            except UserError as error:
                errors.append(str(error))
    for name in losses.RESERVED & hooks.metrics.keys():
        errors.append(f"metrics.{name}: the log itself records this name; choose another one")
    if EARLY_STOPPING in hooks.callbacks and config.stopping.patience is not None:
        errors.append(f"callbacks.{EARLY_STOPPING}: stopping.patience has a callback of this name; choose another one")
    if errors:
        raise UserError("\n".join(errors))
    return hooks


def callbacks_of(config: Config, hooks: Hooks, data: Any, sets: Sequence[str]) -> dict[str, Any]:
    """The callbacks, with the one that `stopping.patience` asks for; without it where nothing is trained. Raises
    UserError where there is nothing to evaluate.

    data: the training data set. sets: the names of those that are evaluated.
    """
    stopping = config.stopping
    chosen_by_name = dict(hooks.callbacks)
    if stopping.patience is None or config.mode != "train":
        return chosen_by_name
    if not sets:
        raise UserError(
            f"stopping.patience={stopping.patience}: data={config.data.target} has no validation split, and patience "
            "counts evaluations; set stopping.patience=null"
        )
    if stopping.metric == "auto":
        direction, metric, _ = Objective.of(config, data, sets)
    else:
        direction, metric = stopping.metric.split()
    early = EarlyStopping(stopping.patience, stopping.min_delta, direction, metric)
    return {**chosen_by_name, EARLY_STOPPING: early}


def attached(session: Session, hooks: Hooks, callbacks: Mapping[str, Any]) -> Session:
    """The run, with what is called in it. callbacks: see `callbacks_of`. Raises UserError for parts that do not fit."""
    session.metrics = _metrics_of(session, hooks)
    session.engine.stateful_metrics = session.metrics.names
    session.callbacks = Callbacks(callbacks)
    session.meter.utilisation = _utilisation_of(session)
    last = [session.task, *session.engine.tasks.values()][-1]  # the update whose count is that of a finished step
    session.meter.counts_tokens = losses.counts_tokens(last)
    session.meter.hook_tensors = functools.partial(_tensors_of, session.metrics, callbacks, session.state.model)
    return session


def _tensors_of(metrics: StatefulMetrics, callbacks: Mapping[str, Any], model: nn.Module) -> Iterator[Tensor]:
    """What metrics and callbacks keep in memory, but for tensors that are the model's as well."""
    yield from metrics.tensors()
    held = [tensor for tensor in held_tensors([callbacks], with_modules=True) if tensor.layout is torch.strided]
    if held:  # else the model's storages need not be listed
        others = {storage_id(local(p).untyped_storage()) for p in (*model.parameters(), *model.buffers())}
        for tensor in held:
            storage = local(tensor).untyped_storage()
            if storage_id(storage) not in others and storage.filename is None:  # else it is a view of a file
                yield tensor


def _metrics_of(session: Session, hooks: Hooks) -> StatefulMetrics:
    """On the device, where their states count as memory."""
    metrics = StatefulMetrics(hooks.metrics, hooks.metrics)
    loss_chunk = session.config.memory.loss_chunk
    if metrics.names and loss_chunk is not None and losses.is_built_in(session.task):
        raise UserError(
            f"memory.loss_chunk={loss_chunk} with metrics.{sorted(metrics.names)[0]}: metrics get logits, which a loss "
            "in chunks never has as a whole; use memory.loss_chunk=null, or a task of your own"
        )
    for metric in hooks.metrics.values():
        if isinstance(metric, (Counts, FirstPredictions)) and metric.class_dim.dim is None:
            metric.class_dim.dim = losses.class_dim(session.task)
    metrics.to(session.state.device)
    return metrics


def _utilisation_of(session: Session) -> Utilisation | None:
    """What counts the model's FLOPs, where the device's peak is known, and the compiler does not hide operations."""
    config = session.config
    if config.train.compile:
        return None
    peak = peak_of(session.state.device, config.precision.mode, config.train.peak_flops)
    if peak is None:
        return None
    recomputes = config.activation_checkpointing.mode != "none"
    return Utilisation(peak * session.ranks.world, lambda: session.attempt.phase is Phase.BACKWARD, recomputes)
