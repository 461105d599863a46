"""A device for autograd on a machine without a GPU: the only file that writes into torch's tables of methods.

Reason: without a driver, torch's autograd engine has no device guard for CUDA, and aborts in the first backward of a
fake CUDA tensor. Traces on the CPU instead were 55% too low to 165% too high. Use only in a separate process: the
changes are permanent. Found on torch 2.13.
"""

import ctypes
import mmap
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

_CODE = {  # machine code of: return 0; return 1; return a stream of device 0
    "x86_64": ("31c0c3", "b801000000c3", "b80100000031d2c3"),
    "aarch64": ("000080d2c0035fd6", "200080d2c0035fd6", "200080d2010080d2c0035fd6"),
}
_kept: list[Any] = []  # objects that torch points to until the process ends


def can_pretend() -> bool:
    """Whether `give_autograd_a_device` supports this platform."""
    return sys.platform == "linux" and platform.machine() in _CODE


def give_autograd_a_device() -> None:
    """Call before any backward, in which torch's engine counts the devices. The engine gets a copy of the CPU's device
    guard, which does nothing, with the answers of a single idle device; CUDA's hooks report a CUDA build without a
    context. Raises RuntimeError if that is impossible.
    """
    if torch.cuda.is_available() or _kept:
        return
    if not can_pretend():
        raise RuntimeError("fake CUDA tensors need Linux on x86-64 or aarch64")
    zero, one, stream = _CODE[platform.machine()]
    registry = (ctypes.c_void_p * 2).in_dll(ctypes.CDLL("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    get_hooks = ctypes.CDLL("libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    guard_methods = _methods("c10/core/impl/DeviceGuardImplInterface.h")
    hooks, hooks_methods = get_hooks(), _methods("ATen/detail/AcceleratorHooksInterface.h")
    torch._C._ensureCUDADeviceGuardSet()
    if not registry[1]:  # a CPU-only build
        guard = (ctypes.c_void_p * 1).from_buffer_copy(ctypes.string_at(registry[0] or 0, 8))
        _kept.append(guard)
        registry[1] = ctypes.addressof(guard)
        _replace(registry[1], guard_methods, {"type": one, "exchangeDevice": one, "getDevice": one})
        _replace(hooks, hooks_methods, {"isBuilt": one})
    _replace(registry[1], guard_methods, {"getStream": stream, "exchangeStream": stream})
    _replace(hooks, hooks_methods, {"hasPrimaryContext": zero})


def _methods(header: str) -> list[str]:
    """The virtual methods of a C++ class in vtable order; a destructor has two entries."""
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    methods = re.findall(r"^\s*virtual [^;{(]*?([~\w]+)\(", text, re.M)
    return [methods[0], *methods] if methods[0].startswith("~") else methods


def _replace(instance: int | None, methods: list[str], codes: dict[str, str]) -> None:
    """Replace virtual methods of one C++ object, through a copy of its vtable."""
    table, before, length = ctypes.c_void_p.from_address(instance or 0), 2, 160  # entries before the first, and at most
    copied = ctypes.string_at((table.value or 0) - 8 * before, 8 * (before + length))
    copy = (ctypes.c_void_p * (before + length)).from_buffer_copy(copied)
    for name, code in codes.items():
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex(code))
        copy[before + methods.index(name)] = ctypes.addressof(ctypes.c_char.from_buffer(page))
        _kept.append(page)
    table.value = ctypes.addressof(copy) + 8 * before
    _kept.append(copy)
