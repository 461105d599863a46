"""`optimizer.offload`: the optimizer's state and update on the host, the parameters and gradients on the device.

In every step gradients and parameters are copied to the host, updated there by the optimizer itself, and the
parameters copied back: ZeRO-Offload (arXiv:2101.06840) without its overlap, since the norm of all gradients comes
first. On the CPU the bits are those of the plain optimizer. The parameters are copied to the host every time, although
only the optimizer changes most of them: a checkpoint, a rollback or a forward may write them, too.

The update allocates nothing on the device. Nothing has changed until all gradients have arrived; an error in the
update itself leaves it half done, as on the device.
"""

from typing import Any

import torch
from torch import Tensor

from trainapp.torch_private import has_values


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
            copy = self._empty(parameter).copy_(parameter.detach())
            self._on_host[id(parameter)], self._on_device[id(copy)] = copy, parameter
            self._gradients[id(parameter)] = self._empty(parameter)
        return self._on_host[id(parameter)]

    def _empty(self, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter, device="cpu", pin_memory=_on_cuda(parameter), requires_grad=False)

    def of_groups(self, groups: list[Any]) -> list[Any]:
        """Parameter groups, or plain parameters, with the copies in them."""
        return [
            {**group, "params": [self.of(p) for p in group["params"]]} if isinstance(group, dict) else self.of(group)
            for group in groups
        ]

    def fetch(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy existing gradients and their parameters to the host, and let groups and state have the copies."""
        for parameter in self._on_device.values():
            if parameter.grad is not None:
                copy, gradient = self._on_host[id(parameter)], self._gradients[id(parameter)]
                gradient.copy_(parameter.grad, non_blocking=True)
                copy.copy_(parameter, non_blocking=True)
                copy.grad = gradient
        for device in {p.device for p in self._on_device.values() if _on_cuda(p)}:
            torch.cuda.current_stream(device).synchronize()  # the host reads what has been copied
        _rename(optimizer, self._on_host)

    def give_back(self) -> None:
        """Copy the parameters that had a gradient back. The next `fetch` waits for it, by the order of the stream."""
        for parameter in self._on_device.values():
            copy = self._on_host[id(parameter)]
            if copy.grad is not None:
                parameter.copy_(copy, non_blocking=True)

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Let groups and state have the parameters instead of the copies, which have no gradients any more."""
        for copy in self._on_host.values():
            copy.grad = None
        _rename(optimizer, self._on_device)


def move_to_host(optimizer: torch.optim.Optimizer, copies: HostCopies) -> None:
    """Let an optimizer that was built for the copies of the parameters step on the host. Between its steps, groups and
    state are those of the parameters.

    Its class becomes a subclass of the same name, so that the checkpoints are the same ones.
    """
    kind = type(optimizer)

    @torch.no_grad()
    def step(self: Any, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        copies.fetch(self)
        try:
            kind.step(self)
            copies.give_back()
        finally:
            copies.release(self)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, (kind,), {"step": step, "host_copies": copies, **names})
    copies.release(optimizer)


def copies_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that, in addition to the state, an optimizer on the host keeps; none for others."""
    copies: HostCopies | None = getattr(optimizer, "host_copies", None)
    return [] if copies is None else copies.tensors


def _on_cuda(tensor: Tensor) -> bool:
    """And not only in a trace."""
    return tensor.device.type == "cuda" and has_values(tensor)


def _rename(optimizer: torch.optim.Optimizer, others: dict[int, Tensor]) -> None:
    """In place: an optimizer of several parts shares groups and state with them."""
    for group in optimizer.param_groups:
        group["params"] = [others[id(parameter)] for parameter in group["params"]]
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for key, value in entries:
        optimizer.state[others[id(key)] if isinstance(key, Tensor) else key] = value
