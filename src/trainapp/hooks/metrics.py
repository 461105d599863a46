"""Metrics that are no mean of per-sample sums: F1, R2, AUROC, perplexity. `metrics.NAME` builds each.

They are updated once per finished batch of an evaluation, merged over ranks, and computed once at its end.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.hooks.metric_failures import MetricFailed, of_compute, of_update
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
    """The metrics of a run's evaluations, by name. Raises UserError for an object that is none.

    failure: of a metric on any rank, which ends the run; set by `results`. passes_on: whether an error of a metric is
    the caller's to handle, such as one for want of memory.
    """

    def __init__(self, metrics: Mapping[str, Any] | None = None):
        self._held: dict[str, MetricState] = {
            name: hold(metric, f"metrics.{name}") for name, metric in (metrics or {}).items()
        }
        self._updated: set[str] = set()
        self._before: dict[str, Any] = {}  # states before an update that may still be undone
        self._has_values = True
        self._empty_bytes = 0  # of the states after `reset`
        self.grow = False  # in a trace: whether an update has added to what they keep
        self.failure: MetricFailed | None = None
        self._failed: MetricFailed | None = None  # this rank's, in the evaluation at work
        self.passes_on: Callable[[Exception], bool] = lambda error: isinstance(
            error, (MemoryError, torch.OutOfMemoryError)
        )

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
        self.passes_on = lambda error: not isinstance(error, (TypeError, ValueError))
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
        self._failed = None
        for held in self._held.values():
            held.metric.reset()
        self._empty_bytes = self._bytes()

    def update(self, passed: Mapping[str, Any]) -> None:
        """Pass on what the task has returned as metrics for a batch: for each configured name, or for EVERY, a tuple of
        positional arguments, a mapping of keyword arguments, or a function that returns one of them.

        After an update that fails, there is none any more in this evaluation, whose end all ranks reach: see `results`.
        """
        if self._failed is not None:
            return
        try:
            self._update(passed)
        except MetricFailed as failed:
            if not self._has_values:
                raise
            self._failed = failed.with_traceback(None)  # whose frames hold the batch

    def try_update(self, passed: Mapping[str, Any]) -> None:
        """As `update` for a first batch, but the metrics stay as they were. Raises MetricFailed where it fails."""
        updated, states = set(self._updated), {name: held.take() for name, held in self._held.items()}
        try:
            for held in self._held.values():
                held.metric.reset()
            self._update(passed)
        finally:
            self._updated = updated
            for name, state in states.items():
                self._held[name].restore(state)

    def _update(self, passed: Mapping[str, Any]) -> None:
        arguments: dict[str, Any] = {}
        for name, held in self._held.items():
            key = name if name in passed else EVERY
            if key not in passed:
                continue
            if key not in arguments:
                arguments[key] = passed[key]() if callable(passed[key]) else passed[key]
            self._update_one(held.metric, name, arguments[key])
            self._updated.add(name)
        if not self._has_values:
            self.grow |= self._bytes() > self._empty_bytes

    def _update_one(self, metric: Any, name: str, arguments: Any) -> None:
        if isinstance(arguments, Mapping):
            positional, named = (), dict(arguments)
        elif isinstance(arguments, (tuple, list)):
            positional, named = tuple(arguments), {}
        else:
            raise MetricFailed(
                f"metrics.{name}: the task returns a {type(arguments).__name__} under metrics[{name!r}], where a tuple "
                "of the arguments of the metric's `update` is expected; if the task has a metric of its own with this "
                "name, choose another one here"
            )
        try:
            metric.update(*positional, **named)
        except Exception as error:
            if self.passes_on(error):
                raise
            raise of_update(name, metric, positional, named, error) from error

    def _bytes(self) -> int:
        return sum(tensor.nbytes for held in self._held.values() for tensor in held.tensors())

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around an update, up to the moment from which the batch counts: an error undoes it."""
        self._before = {name: held.take() for name, held in self._held.items()}
        updated, failed = set(self._updated), self._failed
        try:
            yield
        except BaseException:
            self._updated, self._failed = updated, failed
            for name, state in self._before.items():
                self._held[name].restore(state)
            raise
        finally:
            self._before = {}

    def results(self, ranks: Ranks) -> dict[str, Any]:
        """What each metric computes from the samples of all ranks, the same on each. Collective.

        Nothing where a metric has failed on any rank, or nothing was passed to it: `failure` is set then, on all ranks.
        """
        if not self._held or not self._has_values or self._has_failed(ranks):
            return {}
        silent = self._held.keys() - set().union(*ranks.all_gather_object(self._updated))
        if silent:
            name = sorted(silent)[0]
            self._failed = MetricFailed(
                f"metrics.{name}: the task of evaluations passes nothing to it; under metrics[{name!r}], or "
                f"metrics[{EVERY!r}] for all that are configured, it must return a tuple of the arguments of their "
                "`update`, such as (logits, targets); or the evaluation data has no samples"
            )
        results = {} if silent else self._computed(ranks)
        return {} if self._has_failed(ranks) else results

    def _has_failed(self, ranks: Ranks) -> bool:
        """Whether a metric has, on any rank. Collective."""
        by_rank = ranks.all_gather_object(None if self._failed is None else str(self._failed))
        first = next((text for text in by_rank if text), None)
        if first is not None:
            is_own = self._failed is not None and str(self._failed) == first
            self.failure = self._failed if is_own else MetricFailed(first)
        return first is not None

    def _computed(self, ranks: Ranks) -> dict[str, Any]:
        if ranks.world == 1:
            return self._of_each(lambda _, held: held.computed())
        by_rank = ranks.all_gather_object(self._of_each(lambda _, held: held.exported()))
        if any(len(states) < len(self._held) for states in by_rank):  # a rank has failed
            return {}
        return self._of_each(lambda name, held: held.merged([states[name] for states in by_rank]))

    def _of_each(self, work: Callable[[str, MetricState], Any]) -> dict[str, Any]:
        """By name; of those before the first that fails."""
        found: dict[str, Any] = {}
        for name, held in self._held.items():
            try:
                found[name] = work(name, held)
            except Exception as error:
                if self.passes_on(error):
                    raise
                self._failed = of_compute(name, held.metric, error)
                break
        return found


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
