"""What persists in memory between steps, by category. Sizes are bytes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from trainapp.memory.live_tensors import Category
from trainapp.torch_private import local, storage_id, strided_parts


def static_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    averages: list[Tensor],
    keeps_gradients: bool = True,
) -> dict[Category, int]:
    """Return the bytes that persist between steps, by category.

    Gradients are counted in full, whether or not they exist now; with several optimizers, those of the one with the
    most, since they take turns.

    Args:
        model: the whole model.
        optimizers: all of the step.
        averages: the tensors of the weight average.
        keeps_gradients: whether all gradients exist at once, between backward and update.
    """
    optimizer_state = []
    for optimizer in optimizers:
        optimizer_state.extend(optimizer_tensors(optimizer))
    gradient_bytes = 0
    if keeps_gradients:
        gradient_bytes = _gradient_bytes(model, optimizers)
    return {
        Category.PARAMETERS: size_of(model.parameters()),
        Category.GRADIENTS: gradient_bytes,
        Category.OPTIMIZER_STATE: size_of(optimizer_state),
        Category.BUFFERS: size_of(model.buffers()),
        Category.WEIGHT_AVERAGE: size_of(averages),
    }


def _gradient_bytes(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    if len(optimizers) > 1:
        return max(size_of(_trained_by(optimizer)) for optimizer in optimizers)
    return size_of(p for p in model.parameters() if p.requires_grad)


def _trained_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor that the optimizer keeps on the parameters' device."""
    tensors = []
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if torch.is_tensor(value) and _is_on_device_of(parameter, value):
                tensors.append(value)
    tensors.extend(getattr(optimizer, "tables", ()))
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in _trained_by(optimizer))
    if is_on_cpu:  # beside a GPU the copies are in host memory, which is not counted here
        tensors.extend(getattr(optimizer, "host_copies", ()))
    return tensors


def _is_on_device_of(parameter: object, value: Tensor) -> bool:
    """Return whether a value of a parameter's state is on its device; also if the key is no tensor and has none."""
    return not isinstance(parameter, Tensor) or parameter.device.type == value.device.type


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {}  # tied weights share one
    for tensor in tensors:
        for part in strided_parts(local(tensor)):
            storage = part.untyped_storage()
            storages[storage_id(storage)] = storage
    return sum(storage.nbytes() for storage in storages.values())
