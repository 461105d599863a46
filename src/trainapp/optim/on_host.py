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
        self._all: list[tuple[Tensor, Tensor, Tensor]] = []  # the parameter, its copy, that of its gradient

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [copy for _, *copies in self._all for copy in copies]

    def of_groups(self, groups: list[Any]) -> list[Any]:
        """Parameter groups, or plain parameters, with new copies in them."""
        return [
            {**group, "params": [self._of(p) for p in group["params"]]} if isinstance(group, dict) else self._of(group)
            for group in groups
        ]

    def _of(self, parameter: Tensor) -> Tensor:
        options: dict[str, Any] = {"device": "cpu", "pin_memory": _on_cuda(parameter), "requires_grad": False}
        copy, gradient = (torch.empty_like(parameter, **options) for _ in range(2))
        self._all.append((parameter, copy.copy_(parameter.detach()), gradient))
        return copy

    def fetch(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy existing gradients and their parameters to the host, and let groups and state have the copies."""
        for parameter, copy, gradient in self._all:
            if parameter.grad is not None:
                gradient.copy_(parameter.grad, non_blocking=True)
                copy.copy_(parameter, non_blocking=True)
                copy.grad = gradient
        for device in {parameter.device for parameter, *_ in self._all if _on_cuda(parameter)}:
            torch.cuda.current_stream(device).synchronize()  # the host reads what has been copied
        _rename(optimizer, {id(parameter): copy for parameter, copy, _ in self._all})

    def give_back(self) -> None:
        """Copy the parameters that had a gradient back. The next `fetch` waits for it, by the order of the stream."""
        for parameter, copy, _ in self._all:
            if copy.grad is not None:
                parameter.copy_(copy, non_blocking=True)

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Let groups and state have the parameters instead of the copies, which have no gradients any more."""
        for _, copy, _ in self._all:
            copy.grad = None
        _rename(optimizer, {id(copy): parameter for parameter, copy, _ in self._all})


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
