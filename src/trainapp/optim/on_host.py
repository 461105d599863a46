"""`optimizer.offload`: the optimizer's state and update on the host, the parameters and gradients on the device.

In every step gradients and parameters are copied to the host, updated there by the optimizer itself, and the
parameters copied back: ZeRO-Offload (arXiv:2101.06840) without its overlap, since the norm of all gradients comes
first. On the CPU the bits are those of the plain optimizer. The parameters are copied to the host every time, although
only the optimizer changes most of them: a checkpoint, a rollback or a forward may write them, too.

The update allocates nothing on the device. Nothing has changed until all gradients have arrived; an error in the
update itself leaves it half done, as on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainapp.torch_private import is_tracing


class HostCopies:
    """Copies of an optimizer's parameters and gradients in host memory, pinned where the device is CUDA."""

    def __init__(self) -> None:
        self._on_host: dict[int, Tensor] = {}  # by the id of the parameter
        self._gradients: dict[int, Tensor] = {}  # likewise
        self._on_device: dict[int, Tensor] = {}  # the parameter, by the id of its copy

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self._on_host.values(), *self._gradients.values()]

    def of(self, parameter: Tensor) -> Tensor:
        """The parameter's copy, the same for every call."""
        if id(parameter) not in self._on_host:
            copy = _empty_on_host(parameter).copy_(parameter.detach())
            self._on_host[id(parameter)], self._on_device[id(copy)] = copy, parameter
            self._gradients[id(parameter)] = _empty_on_host(parameter)
        return self._on_host[id(parameter)]

    def of_groups(self, groups: list[Any]) -> list[Any]:
        """Parameter groups, or plain parameters, with the copies in them."""
        return [
            {**group, "params": [self.of(p) for p in group["params"]]} if isinstance(group, dict) else self.of(group)
            for group in groups
        ]

    def fetch(self) -> None:
        """Copy all gradients that exist to the host, and the parameters that have one."""
        for parameter in self._on_device.values():
            copy, gradient = self._on_host[id(parameter)], self._gradients[id(parameter)]
            if parameter.grad is None:
                copy.grad = None
                continue
            gradient.copy_(parameter.grad, non_blocking=True)
            copy.copy_(parameter, non_blocking=True)
            copy.grad = gradient
        for device in {p.device for p in self._on_device.values()}:
            if device.type == "cuda" and not is_tracing():
                torch.cuda.current_stream(device).synchronize()  # the host reads what has been copied

    def give_back(self) -> None:
        """Copy the parameters that had a gradient back. The next `fetch` waits for it, by the order of the stream."""
        for parameter in self._on_device.values():
            copy = self._on_host[id(parameter)]
            if copy.grad is not None:
                parameter.copy_(copy, non_blocking=True)

    def forget_gradients(self) -> None:
        """The copies have no gradients any more; the memory of these stays."""
        for copy in self._on_host.values():
            copy.grad = None

    def put_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Let groups and state have the copies instead of the parameters."""
        _rename(optimizer, self._on_host)

    def take_out_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Let groups and state have the parameters instead of the copies."""
        _rename(optimizer, self._on_device)


def on_host(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of the same name, so that the checkpoints are the same ones, whose steps run on the host.

    Give its constructor the copies of the parameters, and call `expose` when it is built: from then on groups and state
    are those of the parameters, except during a step.
    """
    # Without the record for the profiler and the hooks, which the subclass has around its own.
    update = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step  # type: ignore[attr-defined]

    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        copies: HostCopies | None = vars(self).get("host_copies")
        if copies is None:
            return update(self, closure)
        if closure is not None:
            raise TypeError(f"{kind.__name__} on the host takes no closure")
        with torch.no_grad():
            copies.fetch()
            copies.put_into(self)
            try:
                result = update(self)
                copies.give_back()
            finally:
                copies.take_out_of(self)
                copies.forget_gradients()
        return result

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"step": step, **names})


def expose(optimizer: torch.optim.Optimizer, copies: HostCopies) -> None:
    """From now on groups and state are those of the parameters; see `on_host`."""
    copies.take_out_of(optimizer)
    vars(optimizer)["host_copies"] = copies


def copies_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that, in addition to the state, an optimizer on the host keeps; none for others."""
    copies: HostCopies | None = vars(optimizer).get("host_copies")
    return [] if copies is None else copies.tensors


def _empty_on_host(parameter: Tensor) -> Tensor:
    pinned = parameter.device.type == "cuda" and not is_tracing()
    return torch.empty_like(parameter, device="cpu", pin_memory=pinned, requires_grad=False)


def _rename(optimizer: torch.optim.Optimizer, others: dict[int, Tensor]) -> None:
    """In place: an optimizer of several parts shares groups and state with them."""
    for group in optimizer.param_groups:
        group["params"] = [others[id(parameter)] for parameter in group["params"]]
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for key, value in entries:
        optimizer.state[others[id(key)] if isinstance(key, Tensor) else key] = value
