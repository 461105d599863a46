"""Metrics that are not means of per-sample values, such as F1, R2, AUROC and perplexity, configured by `metrics.NAME`.

A metric is from torchmetrics, or any object with `update`, `compute`, `reset` and, for several ranks, `merge(other)`.
It is updated once per finished batch of an evaluation, merged over ranks, and computed once at its end.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.errors import UserError, add_note
from trainapp.parallel.ranks import Ranks
from trainapp.state.stateful import held_tensors
from trainapp.torch_private import tree_map
from trainapp.units import suggest

EVERY = "*"  # the name under which a task passes arguments to all configured metrics that it does not name
MOST_VALUES = 100  # longest vector whose values are logged individually


def logged_name(name: str, metric: str) -> str:
    """A metric's logged name: `NAME/loss` for the validation set NAME, `loss` for the data's own split, ""."""
    return f"{name}/{metric}" if name else metric


def no_such_metric(setting: str, direction: str, metric: str, known: Iterable[str]) -> UserError:
    """The error for a metric, named by this setting, that the task does not have."""
    names = sorted(known)
    return UserError(
        f"{setting}={direction} {metric}: there is no such metric; there are {', '.join(names)}{suggest(metric, names)}"
    )


class StatefulMetrics:
    """The metrics of a run's evaluations, by name. Raises UserError for an object that is not a metric.

    An error of a metric is raised unchanged, with a note that names the setting.
    """

    def __init__(self, metrics: Mapping[str, Any]):
        self._held = {name: _held(metric, f"metrics.{name}") for name, metric in metrics.items()}
        self.names = frozenset(self._held)
        self._updated: set[str] = set()
        self._before: dict[str, Any] = {}  # states before an update that may be undone

    def to(self, device: torch.device) -> None:
        """Move the metrics that have a method `to`."""
        for held in self._held.values():
            if callable(getattr(held.metric, "to", None)):
                held.metric.to(device)

    def tensors(self) -> list[Tensor]:
        """All tensors retained between batches, and the copies for undoing an update in progress."""
        return list(held_tensors([*(held.metric for held in self._held.values()), self._before]))

    def reset(self) -> None:
        """Call before an evaluation, and after it to free the metrics' states."""
        self._updated.clear()
        for held in self._held.values():
            held.metric.reset()

    def update(self, passed: Mapping[str, Any]) -> None:
        """Pass a task's metrics for a batch on: for each configured name, or for EVERY, a tuple of positional
        arguments, a mapping of keyword arguments, or a function that returns one of them. Raises UserError for anything
        else.
        """
        found: dict[str, Any] = {}
        for name, held in self._held.items():
            key = name if name in passed else EVERY
            if key not in passed:
                continue
            if key not in found:
                found[key] = passed[key]() if callable(passed[key]) else passed[key]
            arguments, kind = found[key], type(held.metric).__name__
            if not isinstance(arguments, (Mapping, tuple, list)):
                raise UserError(
                    f"metrics.{name}: the task returns a {type(arguments).__name__} under metrics[{name!r}], where a "
                    "tuple of the arguments of the metric's `update` is expected; if the task has its own metric with "
                    "this name, choose another one here"
                )
            with _named(f"metrics.{name}: update of a {kind} with what the task returns for it"):
                if isinstance(arguments, Mapping):
                    held.metric.update(**arguments)
                else:
                    held.metric.update(*arguments)
            self._updated.add(name)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around an update until the batch counts: an error undoes the update."""
        self._before, updated = {name: held.take() for name, held in self._held.items()}, set(self._updated)
        try:
            yield
        except BaseException:
            self._updated = updated
            for name, state in self._before.items():
                self._held[name].restore(state)
            raise
        finally:
            self._before = {}

    def require_updates(self, ranks: Ranks) -> None:
        """Raises UserError, on all ranks, for a metric to which nothing was passed on any of them. Collective."""
        for name in sorted(self.names.difference(*ranks.all_gather_object(self._updated))):
            raise UserError(
                f"metrics.{name}: the task of evaluations passes nothing to it; under metrics[{name!r}], or "
                f"metrics[{EVERY!r}] for all that are configured, it must return a tuple of the arguments of their "
                "`update`, such as (logits, targets); or the evaluation data has no samples"
            )

    def results(self, ranks: Ranks, around: Callable[[], contextlib.AbstractContextManager[None]]) -> dict[str, Any]:
        """Each metric's result for the samples of all ranks, equal on every rank. Collective.

        around: a context manager around each metric's `compute`. Raises as `require_updates`.
        """
        if not self._held:
            return {}
        self.require_updates(ranks)
        results = {}
        for name, held in self._held.items():
            with _named(f"metrics.{name}: compute of a {type(held.metric).__name__}"):
                by_rank = ranks.all_gather_object(held.exported()) if ranks.world_size > 1 else []
                with around():
                    results[name] = held.computed(by_rank)
        return results


@contextlib.contextmanager
def _named(work: str) -> Iterator[None]:
    """Add a note to errors that says where they occurred; tracebacks show it."""
    try:
        yield
    except Exception as error:
        add_note(error, f"in {work}")
        raise


class OwnMetric:
    """Any object with `update`, `compute` and `reset`; copied before each batch, to undo its update.

    setting: names the metric, for messages.
    """

    def __init__(self, metric: Any, setting: str):
        self.metric, self._setting = metric, setting

    def take(self) -> Any:
        """The state, for `restore`."""
        with _named(f"copying {self._setting}, which undoes an update that fails"):
            return copy.deepcopy(self.metric)

    def restore(self, state: Any) -> None:
        """Restore a state returned by `take`; only once."""
        self.metric = state

    def exported(self) -> Any:
        """The state to send to other ranks. Raises UserError if it cannot be merged."""
        if not callable(getattr(self.metric, "merge", None)):
            raise UserError(
                f"{self._setting}: each of several ranks has a part of the samples, and a {type(self.metric).__name__} "
                "cannot merge them; give it a method `merge(other)`, which adds the state of another instance of its "
                "class, or derive it from torchmetrics.Metric"
            )
        content = io.BytesIO()
        torch.save(self.metric, content)
        return content.getvalue()

    def computed(self, by_rank: list[Any]) -> Any:
        """The metric's result from the states exported by all ranks, on the host; from its own state if there are
        none.
        """
        if not by_rank:
            return copy.deepcopy(self.metric.compute())  # it may share memory with the state, which is reset
        # The bytes are from this program's own ranks, which run the same code. map_location: for any source device.
        whole, *others = (torch.load(io.BytesIO(part), map_location="cpu", weights_only=False) for part in by_rank)
        for other in others:
            whole.merge(other)
        return whole.compute()


class TorchMetric(OwnMetric):
    """A torchmetrics metric, or a module that holds some: a collection, a wrapper.

    Its states are those declared by `add_state`; lists only grow at the end, so no batch is copied twice. They are
    merged by their `dist_reduce_fx` as in torchmetrics' own `Metric._sync_dist` (1.9), which is not used: it gathers on
    the gradients' process group without a vote, and treats ranks without samples as zeros.
    """

    def __init__(self, metric: nn.Module, setting: str):
        super().__init__(metric, setting)
        for part in self._parts():
            part.distributed_available_fn = lambda: False  # otherwise `compute` merges once more

    def _parts(self) -> list[Any]:
        return list(filter(_declares_states, self.metric.modules()))

    def take(self) -> list[tuple[dict[str, Any], int]]:
        return [({name: _copied(getattr(p, name)) for name in p._reductions}, p._update_count) for p in self._parts()]

    def restore(self, state: list[tuple[dict[str, Any], int]]) -> None:
        for part, (values, count) in zip(self._parts(), state, strict=True):
            for name, value in values.items():
                setattr(part, name, value)
            part._update_count, part._computed = count, None

    def exported(self) -> Any:
        return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, self.take())

    def computed(self, by_rank: list[Any]) -> Any:
        """Merged on the host: joined lists of all samples may be too large for the device. Keeps the state."""
        own, device = self.take(), self._parts()[0].device
        try:
            self.metric.to("cpu")
            for part, *states in zip(self._parts(), *by_rank, strict=True):
                part._computed = None
                if states:
                    _merge_into(part, states)
            return self.metric.compute()
        finally:
            self.restore(own)
            self.metric.to(device)


def _held(metric: Any, setting: str) -> OwnMetric:
    lacking = [method for method in ("update", "compute", "reset") if not callable(getattr(metric, method, None))]
    if lacking:
        raise UserError(
            f"{setting}: a {type(metric).__name__} has no method {' and no method '.join(lacking)}; a metric has "
            "update(...), compute() and reset()"
        )
    is_declared = isinstance(metric, nn.Module) and any(map(_declares_states, metric.modules()))
    return (TorchMetric if is_declared else OwnMetric)(metric, setting)


def _declares_states(module: nn.Module) -> bool:
    return isinstance(getattr(module, "_reductions", None), dict)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else list(value)


def _merge_into(part: Any, states: list[tuple[dict[str, Any], int]]) -> None:
    """Set a metric's states to the merged states of all ranks, ignoring ranks without an update."""
    updated = [values for values, count in states if count] or [states[0][0]]
    for name, reduce in part._reductions.items():
        by_rank = [values[name] for values in updated]
        whole: Any = by_rank[0]
        if len(by_rank) > 1:
            is_list = isinstance(whole, list)
            whole = [item for items in by_rank for item in items] if is_list else torch.stack(by_rank)
            if reduce is not None and len(whole):
                whole = reduce(whole)
        setattr(part, name, whole)
    part._update_count = sum(count for _, count in states)


def as_scalars(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in the metrics' results: a scalar by the metric's name; the entries of a mapping, a sequence or a
    short vector as NAME/KEY. Others, such as a confusion matrix, are left to callbacks. Waits for the device.
    """
    found: dict[str, float] = {}
    for name, value in results.items():
        if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim <= 1:
            value = value.tolist()
        if isinstance(value, (bool, int, float)):
            found[name] = float(value)
        elif isinstance(value, Mapping):
            found |= as_scalars({f"{name}/{key}": part for key, part in value.items()})
        elif isinstance(value, (tuple, list)) and len(value) <= MOST_VALUES:
            names = [name] if len(value) == 1 else [f"{name}/{place}" for place in range(len(value))]
            found |= as_scalars(dict(zip(names, value, strict=True)))
    return found
