"""`optimizer.offload`: optimizer state and update on the host, parameters and gradients on the device.

In every step, gradients and parameters are copied to the host, updated there by the optimizer itself, and the
parameters are copied back: ZeRO-Offload (arXiv:2101.06840) without its overlap, since the norm of all gradients is
needed first. On the CPU the result is bit-identical to the plain optimizer's. The parameters are copied to the host
every time, because a checkpoint, a rollback or a forward may also have written them.

The update allocates nothing on the device. Nothing changes until all gradients have arrived; after an error in the
update itself, which leaves it partially applied as on the device, the optimizer is unusable.
"""

from typing import Any

import torch
from torch import Tensor

from trainapp.torch_private import has_values


class HostCopies:
    """Copies of an optimizer's parameters and gradients in host memory, pinned where the device is CUDA."""

    def __init__(self) -> None:
        self._all: list[tuple[Tensor, Tensor, Tensor]] = []  # the parameter, its copy, that of its gradient

    def of_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with new copies in them."""
        return [group | {"params": [self._of(p) for p in group["params"]]} for group in groups]

    def _of(self, parameter: Tensor) -> Tensor:
        options: dict[str, Any] = {"device": "cpu", "pin_memory": _on_cuda(parameter), "requires_grad": False}
        copy, gradient = (torch.empty_like(parameter, **options) for _ in range(2))
        self._all.append((parameter, copy.copy_(parameter.detach()), gradient))
        return copy

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer built for the copies step on the host. Between its steps, groups and state are keyed by the
        parameters.
        """
        self._release(optimizer)
        optimizer.register_step_pre_hook(lambda optimizer, *_: self._fetch(optimizer))
        optimizer.register_step_post_hook(lambda optimizer, *_: self._give_back(optimizer))
        # For the memory that they take where the host is the parameters' device.
        optimizer.host_copies = [copy for _, *copies in self._all for copy in copies]  # type: ignore[attr-defined]

    @torch.no_grad()
    def _fetch(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy existing gradients and their parameters to the host, and put the copies into groups and state."""
        for parameter, copy, gradient in self._all:
            if parameter.grad is not None:
                gradient.copy_(parameter.grad, non_blocking=True)
                copy.copy_(parameter, non_blocking=True)
                copy.grad = gradient
        for device in {parameter.device for parameter, *_ in self._all if _on_cuda(parameter)}:
            torch.cuda.current_stream(device).synchronize()  # the host reads the copies
        _rename(optimizer, {id(parameter): copy for parameter, copy, _ in self._all})

    @torch.no_grad()
    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy parameters that had a gradient back. The next `_fetch` waits for it, by stream order."""
        for parameter, copy, _ in self._all:
            if copy.grad is not None:
                parameter.copy_(copy, non_blocking=True)
        self._release(optimizer)

    def _release(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the parameters back into groups and state, and drop the copies' gradients."""
        for _, copy, _ in self._all:
            copy.grad = None
        _rename(optimizer, {id(copy): parameter for parameter, copy, _ in self._all})


def _on_cuda(tensor: Tensor) -> bool:
    """Whether the tensor is on CUDA for real, not in a trace."""
    return tensor.device.type == "cuda" and has_values(tensor)


def _rename(optimizer: torch.optim.Optimizer, others: dict[int, Tensor]) -> None:
    """Replace parameters in groups and state, in place: the parts of an optimizer share these objects."""
    for group in optimizer.param_groups:
        group["params"] = [others[id(parameter)] for parameter in group["params"]]
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for key, value in entries:
        optimizer.state[others[id(key)] if isinstance(key, Tensor) else key] = value
