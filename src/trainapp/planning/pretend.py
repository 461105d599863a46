"""Fake CUDA tensors without a GPU: the one file that writes into torch's tables and replaces its functions.

Why at all: torch's autograd engine has no device guard for CUDA where no driver is, and aborts in the first backward of
a fake CUDA tensor; autocast, the loss scaler and the foreach kernels switch themselves off in silence. A trace on the
CPU instead was 55% too low to 165% too high. For a process of its own: what is written stays. Found on torch 2.13.
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

_CODE = {  # machine code of: return 0; return 1; return a stream of device 0
    "x86_64": (b"\x31\xc0\xc3", b"\xb8\x01\0\0\0\xc3", b"\xb8\x01\0\0\0\x31\xd2\xc3"),
    "aarch64": (
        b"\x00\x00\x80\xd2\xc0\x03\x5f\xd6",
        b"\x20\x00\x80\xd2\xc0\x03\x5f\xd6",
        b"\x20\x00\x80\xd2\x01\x00\x80\xd2\xc0\x03\x5f\xd6",
    ),
}
_kept: list[Any] = []  # what torch points to until the process ends


class Idle:
    """In place of `torch.cuda.Stream` and `torch.cuda.Event`: whatever it waits for has happened."""

    def __init__(self, *args: Any, **options: Any):
        """Takes what torch's take."""

    def record_event(self, event: Any = None) -> Any:
        """One that has happened."""
        return event or self

    def _nothing(self, *args: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = synchronize = _nothing


def can_pretend() -> bool:
    """Whether `give_autograd_a_device` knows this platform."""
    return sys.platform == "linux" and platform.machine() in _CODE


@contextlib.contextmanager
def pretended(name: str, capability: tuple[int, int], memory: int) -> Iterator[None]:
    """Inside, `cuda:0` is this device to what builds and steps a run. Enter it outside of a fake tensor mode, after
    `give_autograd_a_device`.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    properties = types.SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=memory)
    state, stream = torch.zeros(16, dtype=torch.uint8), Idle()  # no generator exists, and no number is drawn
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda index=None: name,
        "get_device_properties": lambda index=None: properties,
        "get_device_capability": lambda index=None: capability,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0) or including_emulation,
        "get_rng_state": lambda index=None: state,
        "set_rng_state": lambda new_state, index=None: None,
        "synchronize": lambda index=None: None,
        "Stream": Idle,
        "Event": Idle,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    patches: list[Any] = [mock.patch.object(torch.cuda, one, answer) for one, answer in answers.items()]
    patches += [
        mock.patch.object(torch.accelerator, "current_stream", answers["current_stream"]),
        # Autocast and GradScaler switch themselves off where CUDA is not available, with a warning alone.
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        # DDP's logger insists on timers, which only a build for the device has (2.13, c10d/logger.cpp).
        mock.patch.object(torch._C._distributed_c10d.Logger, "set_runtime_stats_and_log"),
        # Shards that FSDP keeps on the host are pinned, which takes a driver.
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, device=None: tensor.device.type == "cpu"),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # Optimizers and clipping take loops instead of the foreach kernels for subclasses of Tensor. The lists stay the
        # same objects: DTensor adds itself to them when it is first imported (2.13, distributed/tensor/__init__.py).
        for kinds in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
        yield


def give_autograd_a_device() -> None:
    """The engine gets a copy of the CPU's device guard, which does nothing, with the answers of a single idle device;
    and CUDA's hooks say that it is built, and has no context.
    """
    if torch.cuda.is_available() or _kept:
        return
    zero, one, stream = _CODE[platform.machine()]
    registry = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    get_hooks = ctypes.CDLL("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    hooks, hooks_header = get_hooks(), "ATen/detail/AcceleratorHooksInterface.h"
    guard_header = "c10/core/impl/DeviceGuardImplInterface.h"
    torch._C._ensureCUDADeviceGuardSet()
    if not registry[1]:  # a build for the CPU alone
        guard = (ctypes.c_void_p * 1).from_buffer_copy(ctypes.string_at(registry[0] or 0, 8))
        _kept.append(guard)
        registry[1] = ctypes.addressof(guard)
        for name in ("type", "exchangeDevice", "getDevice"):
            _replace_method(registry[1], guard_header, name, one)
        _replace_method(hooks, hooks_header, "isBuilt", one)
    for name in ("getStream", "exchangeStream"):
        _replace_method(registry[1], guard_header, name, stream)
    _replace_method(hooks, hooks_header, "hasPrimaryContext", zero)


def _replace_method(instance: int | None, header: str, name: str, code: bytes) -> None:
    """Replace a virtual method of one C++ object: it gets a copy of its table of methods, which `header` orders."""
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    methods = re.findall(r"^\s*virtual [^;{(]*?([~\w]+)\(", text, re.M)
    place = methods.index(name) + (methods[0].startswith("~"))  # a destructor has two entries
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    table = ctypes.c_void_p.from_address(instance or 0)
    before, length = 2, 160  # what the table has before its first method; more than any of them has
    copy = (ctypes.c_void_p * (before + length)).from_buffer_copy(
        ctypes.string_at((table.value or 0) - 8 * before, 8 * (before + length))
    )
    copy[before + place] = ctypes.addressof(ctypes.c_char.from_buffer(page))
    table.value = ctypes.addressof(copy) + 8 * before
    _kept.extend([page, copy])
