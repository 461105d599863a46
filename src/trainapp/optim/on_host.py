"""`optimizer.offload`: optimizer state and update on the host, parameters and gradients on the device.

In every step, gradients and parameters are copied to the host, updated there by the optimizer itself, and the
parameters are copied back: ZeRO-Offload (arXiv:2101.06840) without its overlap, since the norm of all gradients is
needed first. On the CPU the result is bit-identical to the plain optimizer's. The parameters are copied to the host
every time, because a checkpoint, a rollback or a forward may also have written them.

The update allocates nothing on the device. Nothing changes until all gradients have arrived; after an error in the
update itself, which leaves it partially applied as on the device, the optimizer is unusable.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.torch_private import has_values


class HostCopy(NamedTuple):
    """A parameter with its copies on the host."""

    parameter: Tensor
    copy: Tensor
    gradient: Tensor  # for the parameter's gradient


class HostCopies:
    """Copies of an optimizer's parameters and gradients in host memory, pinned where the device is CUDA."""

    def __init__(self) -> None:
        self._copies: list[HostCopy] = []

    def of_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the parameter groups with new copies of their parameters in place of these."""
        groups_of_copies = []
        for group in groups:
            copies = [self._make_copy(parameter) for parameter in group["params"]]
            groups_of_copies.append({**group, "params": copies})
        return groups_of_copies

    def _make_copy(self, parameter: Tensor) -> Tensor:
        options: dict[str, Any] = {"device": "cpu", "pin_memory": _is_on_cuda(parameter), "requires_grad": False}
        copy = torch.empty_like(parameter, **options)
        gradient = torch.empty_like(parameter, **options)
        copy.copy_(parameter.detach())
        self._copies.append(HostCopy(parameter, copy, gradient))
        return copy

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer that was built for the copies step on the host.

        Between its steps, its groups and state refer to the parameters, during a step to the copies.
        """
        self._release(optimizer)
        optimizer.register_step_pre_hook(lambda optimizer, *_: self._fetch(optimizer))
        optimizer.register_step_post_hook(lambda optimizer, *_: self._give_back(optimizer))

        # Read where the host's memory is also the device's, and is therefore counted.
        host_copies: list[Tensor] = []
        for _, copy, gradient in self._copies:
            host_copies.extend((copy, gradient))
        optimizer.host_copies = host_copies  # type: ignore[attr-defined]

    @torch.no_grad()
    def _fetch(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy existing gradients and their parameters to the host, and put the copies into groups and state."""
        for parameter, copy, gradient in self._copies:
            if parameter.grad is not None:
                gradient.copy_(parameter.grad, non_blocking=True)
                copy.copy_(parameter, non_blocking=True)
                copy.grad = gradient

        # The host is about to read the copies.
        cuda_devices = {parameter.device for parameter, _, _ in self._copies if _is_on_cuda(parameter)}
        for device in cuda_devices:
            torch.cuda.current_stream(device).synchronize()

        copy_by_parameter = {id(parameter): copy for parameter, copy, _ in self._copies}
        _replace_parameters(optimizer, copy_by_parameter)

    @torch.no_grad()
    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy parameters that had a gradient back. The next `_fetch` waits for it, by stream order."""
        for parameter, copy, _ in self._copies:
            if copy.grad is not None:
                parameter.copy_(copy, non_blocking=True)
        self._release(optimizer)

    def _release(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the parameters back into groups and state, and drop the copies' gradients."""
        for _, copy, _ in self._copies:
            copy.grad = None
        parameter_by_copy = {id(copy): parameter for parameter, copy, _ in self._copies}
        _replace_parameters(optimizer, parameter_by_copy)


def _is_on_cuda(tensor: Tensor) -> bool:
    """Return whether the tensor is on CUDA for real, not in a trace."""
    return tensor.device.type == "cuda" and has_values(tensor)


def _replace_parameters(optimizer: torch.optim.Optimizer, replacements: dict[int, Tensor]) -> None:
    """Replace the parameters in groups and state.

    In place: an optimizer that consists of several, such as Muon, shares these objects with them.

    Args:
        optimizer: the optimizer.
        replacements: the new tensors, by the id of the old one.
    """
    for group in optimizer.param_groups:
        group["params"] = [replacements[id(parameter)] for parameter in group["params"]]

    # The state is by parameter; some optimizers also have entries of other kinds.
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for key, state in states:
        if isinstance(key, Tensor):
            key = replacements[id(key)]
        optimizer.state[key] = state
