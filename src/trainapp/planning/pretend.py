"""A CUDA device that this machine does not have, as torch's C++ and Python see it.

`give_autograd_a_device` is for C++, and the only code that writes into torch's tables of methods. Reason: without a
driver, torch's autograd engine has no device guard for CUDA, and aborts in the first backward of a fake CUDA tensor.
Traces on the CPU instead were 55% too low to 165% too high. Use it only in a separate process: the changes are
permanent. Found on torch 2.13. `visible` is for Python, and undone at the end of its block.
"""

import contextlib
import ctypes
import mmap
import platform
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

_CODE = {  # machine code of: return 0; return 1; return a stream of device 0
    "x86_64": ("31c0c3", "b801000000c3", "b80100000031d2c3"),
    "aarch64": ("000080d2c0035fd6", "200080d2c0035fd6", "200080d2010080d2c0035fd6"),
}
_POINTER = 8  # bytes
_BEFORE_VTABLE = 2  # entries in front of the first method
_MOST_METHODS = 160  # entries of a vtable that are copied: more than any here has
_kept_alive: list[Any] = []  # objects that torch points to until the process ends


# --- a device guard for the autograd engine


def can_pretend() -> bool:
    """Return whether `give_autograd_a_device` supports this platform."""
    return sys.platform == "linux" and platform.machine() in _CODE


def give_autograd_a_device() -> None:
    """Make torch's C++ believe in one idle CUDA device. Call before any backward, in which the engine counts devices.

    The engine gets a copy of the CPU's device guard, which does nothing, with the answers of a single idle device;
    CUDA's hooks report a CUDA build without a context. Raises RuntimeError if that is impossible.
    """
    if torch.cuda.is_available() or _kept_alive:
        return
    if not can_pretend():
        raise RuntimeError("fake CUDA tensors need Linux on x86-64 or aarch64")
    zero, one, stream = _CODE[platform.machine()]

    # The registry of device guards, with the CPU's at 0 and CUDA's at 1, and the object with CUDA's hooks.
    registry = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    get_hooks = ctypes.CDLL("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    hooks = get_hooks()
    guard_methods = _methods("c10/core/impl/DeviceGuardImplInterface.h")
    hooks_methods = _methods("ATen/detail/AcceleratorHooksInterface.h")

    # A build for CUDA has a guard of its own; a CPU-only one gets the copy.
    torch._C._ensureCUDADeviceGuardSet()
    if not registry[1]:
        vtable_address = ctypes.string_at(registry[0] or 0, _POINTER)  # all that the CPU's guard consists of
        guard = (ctypes.c_void_p * 1).from_buffer_copy(vtable_address)
        _kept_alive.append(guard)
        registry[1] = ctypes.addressof(guard)
        _replace(registry[1], guard_methods, {"type": one, "exchangeDevice": one, "getDevice": one})
        _replace(hooks, hooks_methods, {"isBuilt": one})

    # Answers that would need a driver.
    _replace(registry[1], guard_methods, {"getStream": stream, "exchangeStream": stream})
    _replace(hooks, hooks_methods, {"hasPrimaryContext": zero})


def _methods(header: str) -> list[str]:
    """Return the virtual methods of a C++ class in vtable order; a destructor has two entries."""
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    methods = re.findall(r"^\s*virtual [^;{(]*?([~\w]+)\(", text, re.M)
    if methods[0].startswith("~"):
        methods.insert(0, methods[0])
    return methods


def _replace(instance: int | None, methods: list[str], codes: dict[str, str]) -> None:
    """Replace virtual methods of one C++ object, through a copy of its vtable.

    Args:
        instance: address of the object, whose first bytes are the address of its vtable.
        methods: names in vtable order.
        codes: machine code in hexadecimal digits, by the name of the method.
    """
    # A copy that may be written to: the original is shared by all objects of the class, and read-only.
    address = ctypes.c_void_p.from_address(instance or 0)
    start = (address.value or 0) - _POINTER * _BEFORE_VTABLE
    length = _BEFORE_VTABLE + _MOST_METHODS
    content = ctypes.string_at(start, _POINTER * length)
    vtable = (ctypes.c_void_p * length).from_buffer_copy(content)

    # Each method's code in memory of its own that may be executed.
    for name, code in codes.items():
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex(code))
        _kept_alive.append(page)
        entry = _BEFORE_VTABLE + methods.index(name)
        vtable[entry] = ctypes.addressof(ctypes.c_char.from_buffer(page))

    _kept_alive.append(vtable)
    address.value = ctypes.addressof(vtable) + _POINTER * _BEFORE_VTABLE


# --- what Python sees of the device


class Idle:
    """Replaces `torch.cuda.Stream` and `torch.cuda.Event`: everything it waits for has already happened."""

    def __init__(self, *args: Any, **options: Any):
        """Accept torch's arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: self


class _HostGenerator(torch.Generator):
    """A host generator that stands for any device's: no numbers are drawn from it."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


@contextlib.contextmanager
def visible(name: str, capability: tuple[int, int], memory: int) -> Iterator[None]:
    """Make `cuda:0` appear as this device to code in the block that builds and steps a run. Enter it outside of a fake
    tensor mode, after `give_autograd_a_device`.

    Args:
        name: of the device.
        capability: its compute capability.
        memory: its memory, in bytes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_patch_torch_cuda(name, capability, memory))
        for patch in _patches_of_torch():
            stack.enter_context(patch)
        # Optimizers and clipping use loops instead of foreach kernels for subclasses of Tensor. The lists must stay the
        # same objects: DTensor adds itself to them on its first import (2.13).
        for types_with_foreach in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            types_with_foreach.append(FakeTensor)
            stack.callback(types_with_foreach.remove, FakeTensor)
        yield


def _patch_torch_cuda(name: str, capability: tuple[int, int], memory: int) -> Any:
    properties = types.SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=memory)
    rng_state = torch.zeros(16, dtype=torch.uint8)
    return mock.patch.multiple(
        torch.cuda,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_properties=lambda index=None: properties,
        get_device_capability=lambda index=None: capability,
        is_bf16_supported=lambda including_emulation=True: capability >= (8, 0) or including_emulation,
        get_rng_state=lambda index=None: rng_state,
        set_rng_state=lambda new_state, index=None: None,
        synchronize=lambda index=None: None,
        Stream=Idle,
        Event=Idle,
        current_stream=Idle,
        stream=lambda stream: contextlib.nullcontext(),
    )


def _patches_of_torch() -> list[Any]:
    return [
        mock.patch.object(torch, "Generator", _HostGenerator),
        mock.patch.object(torch.accelerator, "current_stream", Idle),
        # Autocast and GradScaler switch themselves off without CUDA, with only a warning.
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        # DDP's logger requires timers, which only a CUDA build has (2.13, c10d/logger.cpp).
        mock.patch.object(torch._C._distributed_c10d.Logger, "set_runtime_stats_and_log"),
        # Shards that FSDP keeps on the host are pinned, which needs a driver.
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, device=None: tensor.device.type == "cpu"),
        mock.patch.object(torch.Tensor, "record_stream"),
    ]
