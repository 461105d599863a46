"""What a metric keeps outside the states that it declares to torchmetrics: plain attributes, and buffers.

They are remembered for a rollback like its states. But nothing says how those of several ranks are merged.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from trainapp.data.batch import map_tensors, tensors_in
from trainapp.same_values import are_same
from trainapp.torch_private import buffers_of, outside_dispatch_modes

_OF_TORCH = frozenset(vars(nn.Module()))
_OF_TORCHMETRICS = frozenset(  # what its `Metric` sets in every metric (1.9); none decides the value
    {"_cache", "_computed", "_defaults", "_device", "_dtype_convert", "_enable_grad", "_forward_cache", "_is_synced"}
    | {"_persistent", "_reductions", "_should_unsync", "_to_sync", "_update_count", "_update_signature"}
)
_FLAGS = (str, bool, type(None))


class PlainAttributes:
    """Of a metric's modules, but for classes of torchmetrics itself. Callables, such as tokenizers, are no state."""

    def __init__(self, metric: nn.Module):
        self._metric = metric
        self._first = self.take()

    def _modules(self) -> dict[str, nn.Module]:
        named = self._metric.named_modules()
        return {name: module for name, module in named if not type(module).__module__.startswith("torchmetrics.")}

    def take(self) -> dict[str, dict[str, Any]]:
        """Copies by the name of the module, for `restore`. Raises what an attribute that cannot be copied raises."""
        memo = {id(module): module for module in self._metric.modules()}  # they are restored on their own
        own = {name: _own(module) for name, module in self._modules().items()}
        with outside_dispatch_modes():
            return copy.deepcopy(own, memo)  # at once: what two modules share stays shared

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """Return to what `take` has returned; once."""
        for name, module in self._modules().items():
            before = state.get(name, {})  # nothing of a module that is younger
            for younger in _own(module).keys() - before.keys():
                delattr(module, younger)
            for key, value in before.items():
                setattr(module, key, value)

    def values(self) -> list[dict[str, Any]]:
        """What is kept now."""
        return [_own(module) for module in self._modules().values()]

    def to_host(self) -> None:
        """Move the tensors in them to the CPU, as `Module.to` does with a metric's states."""
        for module in self._modules().values():
            for name, value in _own(module).items():
                if tensors_in(value):
                    setattr(module, name, map_tensors(Tensor.cpu, value))

    def assign(self, values: Mapping[str, Any]) -> None:
        """Set those of these names, as `changed` has them."""
        for name, value in values.items():
            module, _, key = name.rpartition(".")
            setattr(self._metric.get_submodule(module), key, value)

    def changed(self) -> dict[str, Any]:
        """Those that differ from when the metric was new, by name."""
        found: dict[str, Any] = {}
        for name, module in self._modules().items():
            first = self._first.get(name, {})
            for key, value in _own(module).items():
                if key not in first or not are_same(first[key], value, unknown=True):
                    found[f"{name}.{key}".lstrip(".")] = value
        return found


def is_flag(value: Any) -> bool:
    """A value that nothing can be added to, such as the kind of task that a metric recognises in its first update."""
    return isinstance(value, _FLAGS)


def _own(module: nn.Module) -> dict[str, Any]:
    states: Collection[str] = getattr(module, "_reductions", ())
    plain = {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and name not in _OF_TORCHMETRICS and name not in states and not callable(value)
    }
    return plain | buffers_of(module)
