"""Metrics that are no mean of per-sample sums: F1, R2, AUROC, perplexity. `metrics.NAME` builds each.

A metric is one of torchmetrics, or any object with `update`, `compute`, `reset` and, for several ranks, `merge(other)`.
It is updated once per finished batch of an evaluation, merged over ranks, and computed once at its end.
"""

import contextlib
import copy
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainapp.errors import UserError, add_note
from trainapp.parallel.ranks import Ranks
from trainapp.stateful import held_tensors

EVERY = "*"  # under this name a task passes arguments to all configured metrics that it does not name
MOST_VALUES = 100  # of a vector that is logged as one number each


def logged_name(name: str, metric: str) -> str:
    """The name of a metric of the validation set `name`: `NAME/loss`; `loss` of the data's own split, ""."""
    return f"{name}/{metric}" if name else metric


class StatefulMetrics:
    """The metrics of a run's evaluations, by name. Raises UserError for an object that is none.

    An error of a metric is raised as it is, with a note that names the setting.
    """

    def __init__(self, metrics: Mapping[str, Any]):
        self._held: dict[str, OwnMetric] = {name: _held(metric, name) for name, metric in metrics.items()}
        self.names = frozenset(self._held)
        self._updated: set[str] = set()
        self._before: dict[str, Any] = {}  # states before an update that may still be undone

    def to(self, device: torch.device) -> None:
        """Move the metrics that have a method `to`."""
        for held in self._held.values():
            held.to(device)

    def tensors(self) -> list[Tensor]:
        """All tensors that are kept from batch to batch, and the copies that undo an update in progress."""
        kept = [tensor for held in self._held.values() for tensor in held.tensors()]
        return kept + list(held_tensors([self._before], with_modules=True))

    def reset(self) -> None:
        """Before an evaluation, and after it: what metrics keep of all samples would stay in memory."""
        self._updated.clear()
        for held in self._held.values():
            held.metric.reset()

    def update(self, passed: Mapping[str, Any]) -> None:
        """Pass on what the task has returned as metrics for a batch: for each configured name, or for EVERY, a tuple of
        positional arguments, a mapping of keyword arguments, or a function that returns one of them. Raises UserError
        for anything else.
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

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around an update, up to the moment from which the batch counts: an error undoes it."""
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

    def results(self, ranks: Ranks) -> dict[str, Any]:
        """What each metric computes from the samples of all ranks, the same on each. Collective.

        Raises UserError, on all ranks, for a metric to which nothing was passed.
        """
        if not self._held:
            return {}
        silent = self._held.keys() - set().union(*ranks.all_gather_object(self._updated))
        if silent:
            name = sorted(silent)[0]
            raise UserError(
                f"metrics.{name}: the task of evaluations passes nothing to it; under metrics[{name!r}], or "
                f"metrics[{EVERY!r}] for all that are configured, it must return a tuple of the arguments of their "
                "`update`, such as (logits, targets); or the evaluation data has no samples"
            )
        results = {}
        for name, held in self._held.items():
            with _named(f"metrics.{name}: compute of a {type(held.metric).__name__}"):
                by_rank = ranks.all_gather_object(held.exported()) if ranks.world > 1 else None
                results[name] = held.computed(by_rank)
        return results


def _update(metric: Any, name: str, arguments: Any) -> None:
    positional: Sequence[Any] = ()
    named: Mapping[str, Any] = {}
    if isinstance(arguments, Mapping):
        named = arguments
    elif isinstance(arguments, (tuple, list)):
        positional = arguments
    else:
        raise UserError(
            f"metrics.{name}: the task returns a {type(arguments).__name__} under metrics[{name!r}], where a tuple "
            "of the arguments of the metric's `update` is expected; if the task has a metric of its own with this "
            "name, choose another one here"
        )
    with _named(f"metrics.{name}: update of a {type(metric).__name__} with what the task returns for it"):
        metric.update(*positional, **named)


@contextlib.contextmanager
def _named(work: str) -> Iterator[None]:
    """Add to an error's notes whose work it was: tracebacks show them."""
    try:
        yield
    except Exception as error:
        add_note(error, f"in {work}")
        raise


class OwnMetric:
    """Any object with `update`, `compute` and `reset`; it is copied before each batch, to undo its update.

    setting: names the metric, for messages.
    """

    def __init__(self, metric: Any, setting: str):
        self.metric, self._setting = metric, setting

    def to(self, device: torch.device) -> None:
        """Move it, if it can be moved."""
        if callable(getattr(self.metric, "to", None)):
            self.metric.to(device)

    def take(self) -> Any:
        """The state, for `restore`."""
        with _named(f"copying {self._setting}, which undoes an update that fails"):
            return copy.deepcopy(self.metric)

    def restore(self, state: Any) -> None:
        """Return to what `take` has returned; once."""
        self.metric = state

    def tensors(self) -> list[Tensor]:
        """Those that the metric keeps from batch to batch."""
        return list(held_tensors([self.metric], with_modules=True))

    def exported(self) -> Any:
        """The state as it is sent to other ranks. Raises UserError for one that cannot be merged."""
        if not callable(getattr(self.metric, "merge", None)):
            raise UserError(
                f"{self._setting}: on several ranks each has a part of the samples, and a {type(self.metric).__name__} "
                "does not say how parts are merged; give it a method `merge(other)`, which adds what another one of "
                "its class has gathered, or derive it from torchmetrics.Metric"
            )
        content = io.BytesIO()
        torch.save(self.metric, content)
        return content.getvalue()

    def computed(self, by_rank: list[Any] | None) -> Any:
        """What the metric computes from the states that all ranks have exported, on the host; None: from its own."""
        if by_rank is None:
            return copy.deepcopy(self.metric.compute())  # it may be a part of the state, which is reset
        # The bytes are from this program's own ranks, which run the same code. map_location: wherever tensors were.
        whole, *others = (torch.load(io.BytesIO(part), map_location="cpu", weights_only=False) for part in by_rank)
        for other in others:
            whole.merge(other)
        return whole.compute()


class TorchMetric(OwnMetric):
    """A metric of torchmetrics, or a module that holds some: a collection, a wrapper.

    Its states are those that it declares by `add_state`: of lists only the ends are new, so that no batch is copied
    twice. They are merged by their `dist_reduce_fx` as in torchmetrics' own `Metric._sync_dist` (1.9), which gathers
    them on the gradients' process group without a vote, and takes ranks without a sample for zeros.
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
        return [({name: _on_host(value) for name, value in own.items()}, count) for own, count in self.take()]

    def computed(self, by_rank: list[Any] | None) -> Any:
        """On the host: lists of all samples joined may be too large for the device. The own state stays as it is."""
        own, device = self.take(), self._parts()[0].device
        try:
            self.metric.to("cpu")
            for part, *states in zip(self._parts(), *(by_rank or ()), strict=True):
                part._computed = None
                if states:
                    _merge_into(part, states)
            return self.metric.compute()
        finally:
            self.restore(own)
            self.metric.to(device)


def _held(metric: Any, name: str) -> OwnMetric:
    lacking = [method for method in ("update", "compute", "reset") if not callable(getattr(metric, method, None))]
    if lacking:
        raise UserError(
            f"metrics.{name}: a {type(metric).__name__} has no method {' and no method '.join(lacking)}; a metric has "
            "update(...), compute() and reset()"
        )
    is_declared = isinstance(metric, nn.Module) and any(map(_declares_states, metric.modules()))
    return (TorchMetric if is_declared else OwnMetric)(metric, f"metrics.{name}")


def _declares_states(module: nn.Module) -> bool:
    return isinstance(getattr(module, "_reductions", None), dict)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else list(value)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else [item.cpu() for item in value]


def _merge_into(part: Any, states: list[tuple[dict[str, Any], int]]) -> None:
    """Set a metric's states to those of all ranks. A rank without an update has nothing to say, not zeros."""
    updated = [values for values, count in states if count] or [states[0][0]]
    for name, reduce in part._reductions.items():
        by_rank = [values[name] for values in updated]
        whole: Any
        if len(by_rank) == 1:
            whole = by_rank[0]
        elif isinstance(by_rank[0], list):
            whole = [item for items in by_rank for item in items]
            whole = reduce(whole) if whole and reduce is not None else whole
        else:
            stacked = torch.stack(by_rank)
            whole = stacked if reduce is None else reduce(stacked)
        setattr(part, name, whole)
    part._update_count = sum(count for _, count in states)


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
