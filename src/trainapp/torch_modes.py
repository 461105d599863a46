"""The modes of torch that a program may have switched on around a call, which would change what a run computes.

A run from Python computes what the command line does: `without_modes` sets the modes aside, and `hooks_of` tells which
hooks a module or a tensor has. Uses private parts of torch: the public API can push modes and hooks, but not remove
them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer
from torch.overrides import _pop_mode, _push_mode

from trainapp.torch_private import builds_on_meta, outside_dispatch_modes

_AUTOCAST = {"cpu": torch.bfloat16, "cuda": torch.float16}  # devices, and the number format that each begins with
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


class _Switch(NamedTuple):
    """A global setting. default: what a process begins with."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    default: Any


def _attribute(owner: Any, name: str, default: Any) -> _Switch:
    return _Switch(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), default)


_cuda = torch.backends.cuda
_SWITCHES = (
    _Switch(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    _Switch(_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp, True),
    _Switch(_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp, True),
    _Switch(_cuda.math_sdp_enabled, _cuda.enable_math_sdp, True),
    _Switch(_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp, True),
    _Switch(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True),
    _attribute(torch.backends.mkldnn, "enabled", True),
    _attribute(torch.backends.cudnn, "enabled", True),
)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Inside the block, modules are built without values and without memory, on the meta device, for a trace."""
    token = builds_on_meta.set(True)
    try:
        with outside_dispatch_modes(), torch.device("meta"):
            yield
    finally:
        builds_on_meta.reset(token)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Inside the block, torch computes as in a fresh process: no autocast, default device, modes of functions and
    operators, hooks on saved tensors or on all modules and optimizers; gradients are recorded, the default dtype is
    float32. After it, everything is as before. For the calling thread, where a mode is one of a thread.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(outside_dispatch_modes())
        stack.enter_context(_without_function_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_autocast())
        stack.enter_context(_without_saved_tensors_hooks())
        stack.enter_context(_without_global_hooks())
        for switch in _SWITCHES:
            stack.callback(switch.set, switch.get())
            switch.set(switch.default)
        yield


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """A default device is one of them."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Also without its depth: casts of weights are forgotten only where the outermost autocast ends."""
    before = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST}
    depth = 0
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        depth += 1
    torch.clear_autocast_cache()
    try:
        for device, dtype in _AUTOCAST.items():
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, dtype)
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth):
            torch.autocast_increment_nesting()
        for device, (is_enabled, dtype) in before.items():
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    autograd = torch._C._autograd
    refusal = autograd._saved_tensors_hooks_get_disabled_error_message()
    if refusal is not None:
        autograd._saved_tensors_hooks_enable()
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
        if refusal is not None:
            autograd._saved_tensors_hooks_disable(refusal)


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Of all modules and all optimizers. The dictionaries stay: who has registered a hook removes it from there."""
    owned = [vars(owner).items() for owner in (_module, _optimizer)]
    tables = [value for items in owned for name, value in items if name.startswith("_global_") and type(value) is _DICT]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)


_DICT = type(_module._global_forward_hooks)


def hooks_of(owner: nn.Module | Tensor) -> list[Any]:
    """The hooks that are registered on a module or a tensor, in a fixed order."""
    if isinstance(owner, Tensor):
        tables = (owner._backward_hooks, getattr(owner, "_post_accumulate_grad_hooks", None))
        return [hook for table in tables for hook in (table or {}).values()]
    return [hook for name in _HOOKS for hook in getattr(owner, name).values()]


def hooks_of_calls(module: nn.Module) -> list[Any]:
    """Those that a call of the module and its backward run: not those of its state dict."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *hooks_of_backward(module)]


def hooks_of_backward(module: nn.Module) -> list[Any]:
    """Those that the backward runs."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
