"""Metrics that are no mean of per-sample sums: F1, R2, AUROC, perplexity. `metrics.NAME` builds each.

They are updated once per finished batch of an evaluation, merged over ranks, and computed once at its end.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.hooks.metric_states import MetricState, hold
from trainapp.parallel.ranks import Ranks

EVERY = "*"  # under this name a task passes arguments to all configured metrics that it does not name
MOST_VALUES = 100  # of a vector that is logged as one number each


def logged_name(name: str, metric: str) -> str:
    """The name under which a metric of the validation set `name` is logged: `eval_NAME/loss`; `loss` of the data's own
    split, "".
    """
    return f"eval_{name}/{metric}" if name else metric


def setting_name(metric: str) -> str:
    """The name that settings use for a metric that is logged as `eval_NAME/loss`: `NAME/loss`."""
    return metric.removeprefix("eval_") if "/" in metric else metric


def logged_name_of(metric: str, known: Collection[str]) -> str:
    """The inverse of `setting_name`. known: names that are logged."""
    return f"eval_{metric}" if metric not in known and f"eval_{metric}" in known else metric


class StatefulMetrics:
    """The metrics of a run's evaluations, by name. Raises UserError for an object that is none."""

    def __init__(self, metrics: Mapping[str, Any] | None = None):
        self._held: dict[str, MetricState] = {
            name: hold(metric, f"metrics.{name}") for name, metric in (metrics or {}).items()
        }
        self._updated: set[str] = set()
        self._before: dict[str, Any] = {}  # states before an update that may still be undone
        self._has_values = True
        self._empty_bytes = 0  # of the states after `reset`
        self.grow = False  # in a trace: whether an update has added to what they keep

    @property
    def names(self) -> frozenset[str]:
        """Those of the configured metrics."""
        return frozenset(self._held)

    def to(self, device: torch.device) -> None:
        """Move the metrics that have a method `to`."""
        for held in self._held.values():
            if callable(getattr(held.metric, "to", None)):
                moved = held.metric.to(device)
                held.metric = held.metric if moved is None else moved  # as of a tensor, it may be another object

    def without_values(self) -> None:
        """For a trace: switch off what metrics check in values, and compute nothing at the end."""
        self._has_values = False
        for held in self._held.values():
            for part in getattr(held.metric, "modules", tuple)():
                if hasattr(part, "validate_args"):
                    part.validate_args = False

    def tensors(self) -> list[Tensor]:
        """All tensors that are kept from batch to batch, and the copies that undo an update in progress."""
        kept = [tensor for held in self._held.values() for tensor in held.tensors()]
        return kept + [tensor for name, state in self._before.items() for tensor in self._held[name].tensors_of(state)]

    def reset(self) -> None:
        """Before an evaluation, and after it: what metrics keep of all samples would stay in memory."""
        self._updated.clear()
        for held in self._held.values():
            held.metric.reset()
        self._empty_bytes = self._bytes()

    def update(self, passed: Mapping[str, Any]) -> None:
        """Pass on what the task has returned as metrics for a batch: for each configured name, or for EVERY, a tuple of
        positional arguments, a mapping of keyword arguments, or a function that returns one of them.

        Raises UserError for anything else, and for arguments that a metric refuses.
        """
        arguments: dict[str, Any] = {}
        for name, held in self._held.items():
            key = name if name in passed else EVERY
            if key not in passed:
                continue
            if key not in arguments:
                arguments[key] = passed[key]() if callable(passed[key]) else passed[key]
            _update(held.metric, name, arguments[key])
            self._updated.add(name)
        if not self._has_values:
            self.grow |= self._bytes() > self._empty_bytes

    def _bytes(self) -> int:
        return sum(tensor.nbytes for held in self._held.values() for tensor in held.tensors())

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around an update, up to the moment from which the batch counts: an error undoes it."""
        self._before = {name: held.take() for name, held in self._held.items()}
        updated = set(self._updated)
        try:
            yield
        except BaseException:
            self._updated = updated
            for name, state in self._before.items():
                self._held[name].restore(state)
            raise
        finally:
            self._before = {}

    def results(self, ranks: Ranks) -> dict[str, Any]:
        """What each metric computes from the samples of all ranks, the same on each. Collective.

        Raises UserError for a metric that nothing was passed to.
        """
        if not self._held or not self._has_values:
            return {}
        silent = self._held.keys() - set().union(*ranks.all_gather_object(self._updated))
        if silent:
            name = sorted(silent)[0]
            raise UserError(
                f"metrics.{name}: the task of evaluations passes nothing to it; under metrics[{name!r}], or "
                f"metrics[{EVERY!r}] for all that are configured, it must return a tuple of the arguments of their "
                "`update`, such as (logits, targets); or the evaluation data has no samples"
            )
        if ranks.world == 1:
            return {name: held.computed() for name, held in self._held.items()}
        by_rank = ranks.all_gather_object({name: held.exported() for name, held in self._held.items()})
        return {name: held.merged([states[name] for states in by_rank]) for name, held in self._held.items()}


def _update(metric: Any, name: str, arguments: Any) -> None:
    if isinstance(arguments, Mapping):
        positional, named = (), dict(arguments)
    elif isinstance(arguments, (tuple, list)):
        positional, named = tuple(arguments), {}
    else:
        raise UserError(
            f"metrics.{name}: the task returns a {type(arguments).__name__} under metrics[{name!r}], where a tuple of "
            "the arguments of the metric's `update` is expected; if the task has a metric of its own with this name, "
            "choose another one here"
        )
    try:
        metric.update(*positional, **named)
    except (TypeError, ValueError) as error:
        shown = ", ".join([*map(_described, positional), *(f"{key}={_described(v)}" for key, v in named.items())])
        raise UserError(f"metrics.{name}: its update refuses what the task passes ({shown}): {error}") from error


def _described(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def as_scalars(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in what metrics have computed: a scalar by the metric's name, the entries of a mapping, a sequence or
    a short vector as NAME/KEY. Others, such as a confusion matrix, are left to callbacks. Waits for the device.
    """
    found: dict[str, float] = {}
    for name, value in results.items():
        found |= dict(_scalars(name, value))
    return found


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    value = value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim <= 1 else value
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (tuple, list)) and len(value) == 1:
        yield from _scalars(name, value[0])
    elif isinstance(value, (tuple, list)) and len(value) <= MOST_VALUES:
        parts = enumerate(value)
    elif isinstance(value, (bool, int, float)):
        yield name, float(value)
    for key, part in parts:
        yield from _scalars(f"{name}/{key}", part)
