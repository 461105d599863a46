"""Models that cannot be built on tensors without data are built for real, and lose their values afterwards.

Two kinds: lazy modules (under a fake mode, torch 2.13 makes no UninitializedParameter, see torch/nn/parameter.py), and
models that convert themselves, as by `self.half()`: under a fake mode, Module._apply swaps tensors, which fails for
those that anything else refers to (torch/nn/modules/module.py).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.models.inspect import lazy_modules
from trainapp.optim.precision import Precision
from trainapp.plan.values import MadeUpValues
from trainapp.torch_private import buffers_of, outside_dispatch_modes, parameters_of
from trainapp.train.assemble import materialise
from trainapp.train.components import Components


def built_somehow(
    components: Components,
    fake: Callable[[Tensor], Tensor],
    example: Callable[[int], Any],
    device: torch.device,
    precision: Precision,
    values: MadeUpValues,
) -> Callable[..., nn.Module]:
    """The model's class as `assemble` calls it under a fake mode: without data if possible, else for real.

    fake: makes a tensor without data from one with data. example: a real batch of so many samples, for lazy modules.
    values: what tensors without data are taken to hold.
    Raises whatever the class raises on real tensors.
    """

    @functools.wraps(components.model, updated=())
    def build(*args: Any, **kwargs: Any) -> nn.Module:
        try:
            with values.of_construction():
                return components.model(*args, **kwargs)
        except Exception as error:
            first = error
        try:
            with outside_dispatch_modes(), torch.device(device):
                model: nn.Module = components.model(*args, **kwargs)
                if lazy := lazy_modules(model):
                    materialise(model, lazy, example, components.training_tasks, device, precision)
        except Exception as error:
            raise error from first
        drop_values(model, fake)
        return model

    return build


def drop_values(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer by one without data. Those that share memory share it afterwards."""
    replaced: dict[int, Any] = {}
    for module in model.modules():
        for own in (parameters_of(module), buffers_of(module)):
            for name, tensor in list(own.items()):
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    new = fake(tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                        if type(tensor) is nn.Parameter:
                            vars(new).update(vars(tensor))  # what the model has put on it
                    replaced[id(tensor)] = new
                own[name] = replaced[id(tensor)]
        if isinstance(module, nn.RNNBase):  # holds its weights in a list, too, which assigning them fills
            for name, parameter in list(parameters_of(module).items()):
                setattr(module, name, parameter)
