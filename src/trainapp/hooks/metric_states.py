"""What a metric has gathered: remembered for a rollback, and merged over ranks.

Two kinds of objects with `update`, `compute` and `reset`. Those of torchmetrics say for each of their states how it is
merged (`dist_reduce_fx`). Any other is copied as a whole, and merges another one of its class in `merge(other)`.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainapp.checkpoint.held_tensors import held_tensors
from trainapp.data.batch import tensors_in
from trainapp.errors import UserError
from trainapp.hooks.plain_attributes import PlainAttributes, is_flag
from trainapp.torch_private import outside_dispatch_modes

Parts = list[tuple[dict[str, Any], int]]  # of each metric inside: its declared states, and the number of updates
Exported = tuple[Parts, dict[str, Any]]  # on the host; and the plain attributes that updates have changed


class MetricState(Protocol):
    """A metric, and what the program does with its state."""

    metric: Any

    def take(self) -> Any:
        """The state, for `restore`."""
        ...

    def restore(self, state: Any) -> None:
        """Return to what `take` has returned; once."""

    def tensors(self) -> Iterable[Tensor]:
        """Those that the metric keeps from batch to batch."""
        ...

    def tensors_of(self, state: Any) -> Iterable[Tensor]:
        """Those in what `take` has returned."""
        ...

    def exported(self) -> Any:
        """The state as it is sent to other ranks. Raises UserError for one that cannot be merged."""
        ...

    def computed(self) -> Any:
        """What the metric computes from this rank's state alone."""
        ...

    def merged(self, by_rank: list[Any]) -> Any:
        """What the metric computes from the states that all ranks have exported. On the host, where every rank gets the
        same value and none can run out of the device's memory. The metric's own state stays as it is.
        """
        ...


def hold(metric: Any, setting: str) -> MetricState:
    """setting: what names the metric, for messages. Raises UserError for an object that is no metric."""
    lacking = [name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))]
    if lacking:
        raise UserError(
            f"{setting}: a {type(metric).__name__} has no method {' and no method '.join(lacking)}; a metric has "
            "update(...), compute() and reset()"
        )
    if isinstance(metric, nn.Module) and any(map(_declares_states, metric.modules())):
        _refuse_running(metric, setting)
        return DeclaredStates(metric, setting)
    return WholeObject(metric, setting)


def _declares_states(module: nn.Module) -> bool:
    return isinstance(getattr(module, "_reductions", None), dict)


def _refuse_running(metric: nn.Module, setting: str) -> None:
    for part in metric.modules():
        if any(kind.__module__ == "torchmetrics.wrappers.running" for kind in type(part).__mro__):
            raise UserError(
                f"{setting}: a {type(part).__name__} is of the last updates, and how many samples these have follows "
                "from the memory; use the metric without it, which is of all samples"
            )


def _never() -> bool:
    return False


class DeclaredStates:
    """A metric of torchmetrics, or a module that holds some: a collection, a wrapper.

    Rank by rank merging follows torchmetrics' `Metric._sync_dist` (1.9). That one gathers state by state, on the
    gradients' process group and without a vote; and it takes the states of ranks without a sample for zeros.
    """

    def __init__(self, metric: nn.Module, setting: str):
        self.metric: Any = metric
        self._setting = setting
        for part in self._parts():
            part.distributed_available_fn = _never  # otherwise `compute` merges once more
        try:
            self._plain = PlainAttributes(metric)
        except Exception as error:  # whatever attributes raise
            raise _not_copied(metric, setting, error) from error

    def _parts(self) -> list[Any]:
        return [module for module in self.metric.modules() if _declares_states(module)]

    def take(self) -> tuple[Parts, dict[str, Any]]:
        """Copies of tensors, which an update may write in place; lists only grow, so that their items stay as is."""
        return self._states(), self._plain.take()

    def _states(self) -> Parts:
        return [
            ({name: _copied(getattr(part, name)) for name in part._reductions}, part._update_count)
            for part in self._parts()
        ]

    def restore(self, state: tuple[Parts, dict[str, Any]]) -> None:
        states, plain = state
        for part, (values, count) in zip(self._parts(), states, strict=True):
            for name, value in values.items():
                setattr(part, name, value)
            part._update_count, part._computed = count, None
        self._plain.restore(plain)

    def tensors(self) -> list[Tensor]:
        states = tensors_in([getattr(part, name) for part in self._parts() for name in part._reductions])
        plain = list(held_tensors([self._plain.values()], with_modules=True))
        return [*states, *self.metric.parameters(), *self.metric.buffers(), *plain]

    def tensors_of(self, state: tuple[Parts, dict[str, Any]]) -> list[Tensor]:
        states, plain = state
        return [*tensors_in([values for values, _ in states]), *held_tensors([plain], with_modules=True)]

    def exported(self) -> Exported:
        self._share_groups()
        on_host = [({name: _on_host(value) for name, value in own.items()}, count) for own, count in self._states()]
        return on_host, self._plain.changed()

    def _share_groups(self) -> None:
        for collection in self.metric.modules():
            share: Callable[[], None] | None = getattr(collection, "_compute_groups_create_state_ref", None)
            if share is not None:  # only one metric of each group is updated; the others follow when they are asked
                share()

    def computed(self) -> Any:
        with self._on_cpu():
            return self.metric.compute()

    def merged(self, by_rank: list[Exported]) -> Any:
        flags = self._agreed_flags(by_rank)
        with self._on_cpu():
            self.metric.reset()
            for part, states in zip(self._parts(), zip(*(states for states, _ in by_rank), strict=True), strict=True):
                _merge_into(part, list(states))
            self._plain.assign(flags)
            return self.metric.compute()

    def _agreed_flags(self, by_rank: list[Exported]) -> dict[str, Any]:
        """The plain attributes that updates have changed, the same on all ranks that have had one. Raises UserError for
        others.
        """
        updated = [plain for states, plain in by_rank if any(count for _, count in states)]
        for name in {name: None for plain in updated for name in plain}:
            values = [plain.get(name) for plain in updated]
            if not all(is_flag(value) and value == values[0] for value in values):
                raise UserError(
                    f"{self._setting}: on several ranks each has a part of the samples, and nothing says how the "
                    f"attribute {name} of a {type(self.metric).__name__} is merged, which its update changes; declare "
                    "it with add_state(..., dist_reduce_fx=...)"
                )
        return updated[0] if updated else {}

    @contextlib.contextmanager
    def _on_cpu(self) -> Iterator[None]:
        """With its state on the host, where lists that are too large for the device can be joined; restored after."""
        self._share_groups()
        own, device = self.take(), self._parts()[0].device
        try:
            self.metric.to("cpu")
            self._plain.to_host()
            for part in self._parts():
                part._computed = None
            yield
        finally:
            self.restore(own)  # first: what all ranks have gathered may be too large for the device
            self.metric.to(device)


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
            if whole and reduce is not None:
                whole = reduce(whole)
        else:
            stacked = torch.stack(by_rank)
            whole = stacked if reduce is None else reduce(stacked)
        setattr(part, name, whole)
    part._update_count, part._computed = sum(count for _, count in states), None


def _not_copied(metric: Any, setting: str, error: Exception) -> UserError:
    return UserError(
        f"{setting}: a {type(metric).__name__} cannot be copied ({error}), as it must be so that an update that runs "
        "out of memory can be undone; keep locks, files and the like out of its attributes"
    )


class WholeObject:
    """A metric of another kind. `take` copies all of it, once per batch."""

    def __init__(self, metric: Any, setting: str):
        self.metric, self._setting = metric, setting
        try:
            self.take()
        except Exception as error:  # whatever its attributes raise
            raise _not_copied(metric, setting, error) from error

    def take(self) -> Any:
        with outside_dispatch_modes():  # torch cannot copy a tensor that was there before a trace inside it
            return copy.deepcopy(self.metric)

    def restore(self, state: Any) -> None:
        self.metric = state

    def tensors(self) -> list[Tensor]:
        return self.tensors_of(self.metric)

    def tensors_of(self, state: Any) -> list[Tensor]:
        return list(held_tensors([state], with_modules=True))

    def exported(self) -> bytes:
        if not callable(getattr(self.metric, "merge", None)):
            raise UserError(
                f"{self._setting}: on several ranks each has a part of the samples, and a {type(self.metric).__name__} "
                "does not say how parts are merged; give it a method `merge(other)`, which adds what another one of "
                "its class has gathered, or derive it from torchmetrics.Metric"
            )
        content = io.BytesIO()
        try:
            torch.save(self.metric, content)
        except Exception as error:  # whatever its attributes raise
            raise UserError(f"{self._setting}: it cannot be sent to other ranks: {error}") from error
        return content.getvalue()

    def computed(self) -> Any:
        return copy.deepcopy(self.metric.compute())  # it may be a part of the state, which is reset

    def merged(self, by_rank: list[bytes]) -> Any:
        # The bytes are from this program's own ranks, which run the same code. map_location: wherever tensors were.
        whole, *others = (torch.load(io.BytesIO(part), map_location="cpu", weights_only=False) for part in by_rank)
        for other in others:
            whole.merge(other)
        return whole.compute()
