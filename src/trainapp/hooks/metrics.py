"""Metrics that are not means of per-sample values, such as F1, R2, AUROC and perplexity, configured by `metrics.NAME`.

A metric is from torchmetrics, or any object with `update`, `compute`, `reset` and, for several ranks, `merge(other)`.
It is updated once per finished batch of an evaluation, merged over ranks, and computed once at its end.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.hooks.metric_state import WrappedMetric, note_on_error, wrap_metric
from trainapp.parallel.ranks import Ranks
from trainapp.state.stateful import held_tensors
from trainapp.units import suggest

EVERY = "*"  # the name under which a task passes arguments to all configured metrics that it does not name
MOST_VALUES = 100  # longest vector whose values are logged individually


def logged_name(name: str, metric: str) -> str:
    """Return a metric's logged name: `NAME/loss` for the validation set NAME, `loss` for the data's own split, ""."""
    if not name:
        return metric
    return f"{name}/{metric}"


def no_such_metric(setting: str, direction: str, metric: str, names: Iterable[str]) -> UserError:
    """Return the error for a metric that the task does not have.

    Args:
        setting: names the metric.
        direction: in the setting.
        metric: its name.
        names: of the metrics that the task has.
    """
    names = sorted(names)
    suggestion = suggest(metric, names)
    return UserError(
        f"{setting}={direction} {metric}: there is no such metric; there are {', '.join(names)}{suggestion}"
    )


class StatefulMetrics:
    """The metrics of a run's evaluations, by name. Raises UserError for an object that is not a metric.

    An error of a metric is raised unchanged, with a note that names the setting.

    Attributes:
        awaits_samples_first: whether a metric takes the first dimension of its arguments for the samples, and no batch
            has been checked for that; see `require_samples_first`.
    """

    def __init__(self, metrics: Mapping[str, Any]):
        self._wrappers = {name: wrap_metric(metric, f"metrics.{name}") for name, metric in metrics.items()}
        self.names = frozenset(self._wrappers)
        self.awaits_samples_first = any(map(_takes_samples_first, self._wrappers.values()))
        self._updated: set[str] = set()  # names of the metrics updated in this evaluation
        self._states_before: dict[str, Any] = {}  # before an update that may be undone

    def to(self, device: torch.device) -> None:
        """Move the metrics that have a method `to`."""
        for wrapper in self._wrappers.values():
            if callable(getattr(wrapper.metric, "to", None)):
                wrapper.metric.to(device)

    def tensors(self) -> list[Tensor]:
        """Return all tensors retained between batches, and the copies for undoing an update in progress."""
        metrics = [wrapper.metric for wrapper in self._wrappers.values()]
        return list(held_tensors([*metrics, self._states_before]))

    def reset(self) -> None:
        """Reset all metrics. Call before an evaluation, and after it to free the metrics' states."""
        self._updated.clear()
        for wrapper in self._wrappers.values():
            wrapper.metric.reset()

    def update(self, task_metrics: Mapping[str, Any]) -> None:
        """Update the metrics with a batch. Raises UserError for arguments of another form.

        Args:
            task_metrics: what the task returns for the batch: for each configured name, or for EVERY, a tuple of
                positional arguments, a mapping of keyword arguments, or a function that returns one of them.
        """
        for name, wrapper, arguments in self._arguments(task_metrics):
            kind = type(wrapper.metric).__name__
            with note_on_error(f"metrics.{name}: update of a {kind} with what the task returns for it"):
                if isinstance(arguments, Mapping):
                    wrapper.metric.update(**arguments)
                else:
                    wrapper.metric.update(*arguments)
            self._updated.add(name)

    def require_samples_first(self, task_metrics: Mapping[str, Any], samples: int) -> None:
        """Have the metrics that take the first dimension of their arguments for the samples raise UserError if it is of
        another length.

        Args:
            task_metrics: see `update`.
            samples: in the batch.
        """
        for _, wrapper, arguments in self._arguments(task_metrics):
            if not _takes_samples_first(wrapper):
                continue
            if isinstance(arguments, Mapping):
                wrapper.metric.require_samples_first(samples, **arguments)
            else:
                wrapper.metric.require_samples_first(samples, *arguments)

    def _arguments(self, task_metrics: Mapping[str, Any]) -> Iterator[tuple[str, WrappedMetric, Any]]:
        """Yield name, metric and arguments of each metric to which the task passes something.

        Raises UserError for arguments of another form than `update` describes.
        """
        arguments_by_key: dict[str, Any] = {}  # a function is called once, also for several metrics
        for name, wrapper in self._wrappers.items():
            # What the task returns for this metric.
            key = name if name in task_metrics else EVERY
            if key not in task_metrics:  # of some batches only
                continue
            if key not in arguments_by_key:
                arguments = task_metrics[key]
                if callable(arguments):
                    arguments = arguments()
                arguments_by_key[key] = arguments
            arguments = arguments_by_key[key]
            if not isinstance(arguments, (Mapping, tuple, list)):
                raise UserError(
                    f"metrics.{name}: the task returns a {type(arguments).__name__} under metrics[{name!r}], where a "
                    "tuple of the arguments of the metric's `update` is expected; if the task has its own metric with "
                    "this name, choose another one here"
                )
            yield name, wrapper, arguments

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undo the block's update after an error. The block lasts until the batch counts."""
        self._states_before = {name: wrapper.copy_state() for name, wrapper in self._wrappers.items()}
        updated_before = set(self._updated)
        try:
            yield
        except BaseException:
            self._updated = updated_before
            for name, state in self._states_before.items():
                self._wrappers[name].restore(state)
            raise
        finally:
            self._states_before = {}

    def require_updates(self, ranks: Ranks) -> None:
        """Raise UserError, on all ranks, for a metric to which nothing was passed on any of them. Collective."""
        never_updated = self.names.difference(*ranks.all_gather_object(self._updated))
        for name in sorted(never_updated):
            raise UserError(
                f"metrics.{name}: the task of evaluations passes nothing to it; under metrics[{name!r}], or "
                f"metrics[{EVERY!r}] for all that are configured, it must return a tuple of the arguments of their "
                "`update`, such as (logits, targets); or the evaluation data has no samples"
            )

    def results(
        self, ranks: Ranks, compute_context: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> dict[str, Any]:
        """Return each metric's result for the samples of all ranks, equal on every rank. Collective.

        Raises UserError as `require_updates`.

        Args:
            ranks: of the run.
            compute_context: returns a context manager for each metric's `compute`.
        """
        if not self._wrappers:
            return {}
        self.require_updates(ranks)
        results = {}
        for name, wrapper in self._wrappers.items():
            with note_on_error(f"metrics.{name}: compute of a {type(wrapper.metric).__name__}"):
                states = []
                if ranks.world_size > 1:
                    states = ranks.all_gather_object(wrapper.export_state())
                with compute_context():
                    results[name] = wrapper.compute(states)
        return results


def _takes_samples_first(wrapper: WrappedMetric) -> bool:
    return callable(getattr(wrapper.metric, "require_samples_first", None))


def as_scalars(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in the metrics' results. Waits for the device.

    A scalar has the metric's name; the values of a mapping, a sequence or a short vector are NAME/KEY. Others, such as
    a confusion matrix, are left to callbacks.
    """
    scalars: dict[str, float] = {}
    for name, value in results.items():
        if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim <= 1:
            value = value.tolist()
        if isinstance(value, (bool, int, float)):
            scalars[name] = float(value)
            continue

        # The parts of several values, which may have parts themselves.
        parts: dict[str, Any] = {}
        if isinstance(value, Mapping):
            parts = {f"{name}/{key}": part for key, part in value.items()}
        elif isinstance(value, (tuple, list)) and len(value) == 1:
            parts = {name: value[0]}
        elif isinstance(value, (tuple, list)) and len(value) <= MOST_VALUES:
            parts = {f"{name}/{index}": part for index, part in enumerate(value)}
        scalars |= as_scalars(parts)
    return scalars
