"""Models that cannot be built on tensors without data.

Those that convert themselves, as by `self.half()` and peft's adapters, are built on the meta device: under a fake mode,
Module._apply swaps tensors, which fails for those that anything else refers to (torch 2.13, nn/modules/module.py).
Lazy modules, and those that read values, are built for real, and lose their values afterwards: under a fake mode, torch
makes no UninitializedParameter (nn/parameter.py).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.assembly.components import Components
from trainapp.assembly.model import materialise
from trainapp.models.inspect import lazy_modules
from trainapp.optim.precision import Precision
from trainapp.planning.values import MadeUpValues
from trainapp.torch_private import buffers_of, builds_on_meta, outside_dispatch_modes, parameters_of, tree_leaves


def built_somehow(
    components: Components,
    fake: Callable[[Tensor], Tensor],
    example: Callable[[int], Any],
    device: torch.device,
    precision: Precision,
    values: MadeUpValues,
) -> Callable[..., nn.Module]:
    """The model's class as `assemble` calls it under a fake mode: without data if possible, else on the meta device if
    nothing but parameters and buffers is left there, else for real.

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
        on_meta = _built_on_meta(functools.partial(components.model, *args, **kwargs))
        if on_meta is not None:
            drop_values(on_meta, functools.partial(_from_meta, device, fake))
            return on_meta
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


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Inside the block, modules are built without values and without memory, on the meta device."""
    token = builds_on_meta.set(True)
    try:
        with outside_dispatch_modes(), torch.device("meta"):
            yield
    finally:
        builds_on_meta.reset(token)


def _built_on_meta(build: Callable[[], nn.Module]) -> nn.Module | None:
    """What is built without memory; None where that fails, or leaves tensors that no trace would replace."""
    try:
        with _on_meta():
            model = build()
    except Exception:  # it is built for real, or raises there
        return None
    replaced = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = tree_leaves([vars(module) for module in model.modules()])
    others = any(isinstance(one, Tensor) and one.is_meta and id(one) not in replaced for one in held)
    return None if others or lazy_modules(model) else model


def _from_meta(device: torch.device, fake: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """As `fake`, of a tensor that may be on the meta device."""
    if not tensor.is_meta:
        return fake(tensor)
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return like.to(fake(torch.empty(0, device=device)).device)


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
