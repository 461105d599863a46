"""The state of one stateful metric: copied to undo an update, and merged over ranks.

Each kind of metric has a wrapper: `TorchMetric` for torchmetrics, `WrappedMetric` for any other object.
"""

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.errors import UserError, add_note
from trainapp.torch_private import tree_map

METRIC_METHODS = ("update", "compute", "reset")


def wrap_metric(metric: Any, setting: str) -> "WrappedMetric":
    """Return the wrapper for a metric. Raises UserError for an object that is not one.

    Args:
        metric: from torchmetrics, or any object with the three methods.
        setting: names the metric, for messages.
    """
    missing = [method for method in METRIC_METHODS if not callable(getattr(metric, method, None))]
    if missing:
        methods = " and no method ".join(missing)
        raise UserError(
            f"{setting}: a {type(metric).__name__} has no method {methods}; a metric has "
            "update(...), compute() and reset()"
        )
    if isinstance(metric, nn.Module) and any(_declares_states(module) for module in metric.modules()):
        return TorchMetric(metric, setting)
    return WrappedMetric(metric, setting)


class WrappedMetric:
    """Any object with `update`, `compute` and `reset`; copied before each batch, to undo its update.

    Args:
        metric: the object.
        setting: names the metric, for messages.
    """

    def __init__(self, metric: Any, setting: str):
        self.metric = metric
        self._setting = setting

    def copy_state(self) -> Any:
        """Return the state, for `restore`."""
        with note_on_error(f"copying {self._setting}, which undoes an update that fails"):
            return copy.deepcopy(self.metric)

    def restore(self, state: Any) -> None:
        """Restore a state returned by `copy_state`; only once."""
        self.metric = state

    def export_state(self) -> Any:
        """Return the state to send to other ranks. Raises UserError if it cannot be merged."""
        if not callable(getattr(self.metric, "merge", None)):
            raise UserError(
                f"{self._setting}: each of several ranks has a part of the samples, and a {type(self.metric).__name__} "
                "cannot merge them; give it a method `merge(other)`, which adds the state of another instance of its "
                "class, or derive it from torchmetrics.Metric"
            )
        buffer = io.BytesIO()
        torch.save(self.metric, buffer)
        return buffer.getvalue()

    def compute(self, states: list[Any]) -> Any:
        """Return the metric's result.

        Args:
            states: exported by all ranks, merged on the host; empty: the metric's own state is used.
        """
        if not states:
            return copy.deepcopy(self.metric.compute())  # it may share memory with the state, which is reset
        # The bytes are from this program's own ranks, which run the same code. map_location: for any source device.
        metrics = []
        for state in states:
            metrics.append(torch.load(io.BytesIO(state), map_location="cpu", weights_only=False))
        merged = metrics[0]
        for metric in metrics[1:]:
            merged.merge(metric)
        return merged.compute()


TorchStates = list[tuple[dict[str, Any], int]]  # of each metric in a module: states by name, and its number of updates


class TorchMetric(WrappedMetric):
    """A torchmetrics metric, or a module that contains some: a collection, a wrapper.

    Its states are those declared by `add_state`; lists only grow at the end, so no batch is copied twice. They are
    merged by their `dist_reduce_fx` as in torchmetrics' own `Metric._sync_dist` (1.9), which is not used: it gathers on
    the gradients' process group without a vote, and treats ranks without samples as zeros.
    """

    def __init__(self, metric: nn.Module, setting: str):
        super().__init__(metric, setting)
        for part in self._parts():
            part.distributed_available_fn = lambda: False  # otherwise `compute` merges once more

    def _parts(self) -> list[Any]:
        """Return the modules that declare states."""
        return [module for module in self.metric.modules() if _declares_states(module)]

    def copy_state(self) -> TorchStates:
        states = []
        for part in self._parts():
            values = {name: _copied(getattr(part, name)) for name in part._reductions}
            states.append((values, part._update_count))
        return states

    def restore(self, state: TorchStates) -> None:
        for part, (values, update_count) in zip(self._parts(), state, strict=True):
            for name, value in values.items():
                setattr(part, name, value)
            part._update_count = update_count
            part._computed = None  # the cached result

    def export_state(self) -> TorchStates:
        return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, self.copy_state())

    def compute(self, states: list[TorchStates]) -> Any:
        """Compute on the host: joined lists of all samples may be too large for the device. The state is unchanged."""
        state_before = self.copy_state()
        device = self._parts()[0].device
        try:
            self.metric.to("cpu")
            for part, *states_by_rank in zip(self._parts(), *states, strict=True):
                part._computed = None
                if states_by_rank:
                    _merge_into(part, states_by_rank)
            return self.metric.compute()
        finally:
            self.restore(state_before)
            self.metric.to(device)


def _declares_states(module: nn.Module) -> bool:
    return isinstance(getattr(module, "_reductions", None), dict)


def _copied(value: Any) -> Any:
    """Return a copy of a state: a tensor, or a list of tensors, which are never changed in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value)


def _merge_into(part: Any, states_by_rank: TorchStates) -> None:
    """Set a metric's states to the merged states of all ranks, ignoring ranks without an update."""
    # Without any update, the first rank's: all ranks have the same initial states.
    updated = [values for values, update_count in states_by_rank if update_count]
    if not updated:
        updated = [states_by_rank[0][0]]

    for name, reduce in part._reductions.items():
        values_by_rank = [values[name] for values in updated]
        setattr(part, name, _merged(values_by_rank, reduce))
    part._update_count = sum(update_count for _, update_count in states_by_rank)


def _merged(values: list[Any], reduce: Any) -> Any:
    """Return one state of all ranks.

    Args:
        values: by rank: tensors of the same shape, or lists.
        reduce: the state's `dist_reduce_fx`, which takes the stacked tensors, or the joined list.
    """
    if len(values) == 1:
        return values[0]

    # The states of all ranks together, which the reduction takes.
    whole: Any
    if isinstance(values[0], list):
        whole = [element for part in values for element in part]
    else:
        whole = torch.stack(values)
    if reduce is not None and len(whole):
        return reduce(whole)
    return whole


@contextlib.contextmanager
def note_on_error(work: str) -> Iterator[None]:
    """Add a note to errors that says in which work they occurred; tracebacks show it."""
    try:
        yield
    except Exception as error:
        add_note(error, f"in {work}")
        raise
