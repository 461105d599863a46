"""Modes of torch around a call: set aside inside the block, and in force again after it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainapp.torch_modes import hooks_of, without_modes


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.tanh else result


class DoublesBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.mul_(2) if function is torch.ops.aten.tanh.default else result


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def global_hook():
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def optimizer_hook():
    def triples(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(3)

    handle = register_optimizer_step_pre_hook(triples)
    try:
        yield
    finally:
        handle.remove()


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in fp16": lambda: torch.autocast("cpu", torch.float16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "function mode": Doubles,
    "dispatch mode": DoublesBelow,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor),
    "no hooks on saved tensors": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "hook of all modules": global_hook,
    "hook of all optimizers": optimizer_hook,
}


def trained():
    """Two steps of a layer, and what depends on modes beside it; or the name of the error."""
    try:
        torch.manual_seed(0)
        layer, inputs = nn.Linear(4, 4), torch.ones(2, 4)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(2):
            layer(inputs).tanh().pow(2).sum().backward()
            optimizer.step()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            torch.tanh(layer(inputs))
        with torch.autocast("cpu"):
            own = layer(inputs).dtype
        return layer.weight.tolist(), layer.weight.dtype, own, torch.tanh(inputs).tolist()
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


@pytest.mark.parametrize("name", MODES)
def test_a_mode_does_not_reach_the_block(name):
    plain = trained()
    with MODES[name]():
        before = trained()
        assert before != plain  # else the mode is none
        with without_modes():
            assert trained() == plain
        assert trained() == before
    assert trained() == plain


def test_all_modes_at_once_and_an_error():
    plain = trained()
    chosen = [name for name in MODES if name != "no hooks on saved tensors"]
    with contextlib.ExitStack() as stack:
        for name in chosen:
            stack.enter_context(MODES[name]())
        with contextlib.suppress(KeyError), without_modes():
            assert trained() == plain
            raise KeyError
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() is torch.float64
    assert trained() == plain


def test_casts_of_weights_are_forgotten_between_autocasts():
    """They are kept until the outermost autocast ends, which is the caller's."""
    layer = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16), without_modes():
        results = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(layer(torch.ones(2)).tolist())
            with torch.no_grad():
                layer.weight.add_(1.0)
    assert results[0] != results[1]


def test_hooks_of_a_module_and_a_tensor():
    layer = nn.Linear(2, 2)

    def hook(*_): ...

    assert hooks_of(layer) == hooks_of(layer.weight) == []
    handles = [
        layer.register_forward_hook(hook),
        layer.register_full_backward_pre_hook(hook),
        layer.register_state_dict_post_hook(hook),
    ]
    assert hooks_of(layer) == [hook] * 3
    handles += [layer.weight.register_hook(hook), layer.weight.register_post_accumulate_grad_hook(hook)]
    assert hooks_of(layer.weight) == [hook] * 2
    for handle in handles:
        handle.remove()
    assert hooks_of(layer) == hooks_of(layer.weight) == []
