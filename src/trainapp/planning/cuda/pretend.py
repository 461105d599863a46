"""Everything that is pretended of torch to trace a step on CUDA tensors without a GPU, each with its reason.

For a process of its own: parts of torch are replaced for good. `self_test.require` shows that each is in force. Found
on torch 2.13, with its wheels for the CPU alone; tests/planning/test_pretended_cuda.py tests every one of them.
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

from trainapp.planning.cuda import streams
from trainapp.planning.cuda.attention import FunctionsOf, workspace_of_backward
from trainapp.planning.cuda.devices import Device
from trainapp.torch_operators import ASKS_DEVICE
from trainapp.torch_private import DispatchMode

_CODE = {  # machine code of: return 0; return 1; return a stream of device 0
    "x86_64": (b"\x31\xc0\xc3", b"\xb8\x01\0\0\0\xc3", b"\xb8\x01\0\0\0\x31\xd2\xc3"),
    "aarch64": (
        b"\x00\x00\x80\xd2\xc0\x03\x5f\xd6",
        b"\x20\x00\x80\xd2\xc0\x03\x5f\xd6",
        b"\x20\x00\x80\xd2\x01\x00\x80\xd2\xc0\x03\x5f\xd6",
    ),
}
_CALL = torch._ops.OpOverload.__call__.__code__  # by which a mode calls the next one
# Formulas of the backward fill zeros in place, but not for subclasses of Tensor (2.13, areAnyTensorSubclassLike in
# torch/csrc/autograd/FunctionsManual.cpp): those of max, topk and their like, of gather and index_select.
_FILLS_ZEROS: dict[Any, Any] = {
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
_IN_PLACE = {torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor, **_FILLS_ZEROS}
_MODES = ("__torch_dispatch__", "__torch_function__")  # a function mode sees the calls of dispatch modes, too
# Shards that FSDP keeps on the host are pinned, which takes a driver.
_OF_HOST_TENSORS: dict[str, Any] = {
    "pin_memory": lambda tensor, device=None: tensor,
    "is_pinned": lambda tensor, device=None: tensor.device.type == "cpu",
}
_kept: list[Any] = []  # what torch points to until the process ends


def can_pretend() -> bool:
    """Whether `give_autograd_a_device` knows this platform."""
    return sys.platform == "linux" and platform.machine() in _CODE


@contextlib.contextmanager
def pretended(device: Device) -> Iterator[None]:
    """Inside, `cuda:0` is this device to what builds and steps a run. Enter it outside of a fake tensor mode.

    Raises RuntimeError on platforms that `can_pretend` does not know.
    """
    if not can_pretend():
        raise RuntimeError(
            f"fake CUDA tensors need Linux on x86-64 or aarch64, not {sys.platform} {platform.machine()}"
        )
    give_autograd_a_device()
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    properties = types.SimpleNamespace(
        name=device.name, major=device.capability[0], minor=device.capability[1], total_memory=device.memory
    )
    state = torch.zeros(16, dtype=torch.uint8)  # of the generator, which lives on the host
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda index=None: device.name,
        "get_device_properties": lambda index=None: properties,
        "get_device_capability": lambda index=None: device.capability,
        "is_bf16_supported": lambda including_emulation=True: device.has_bf16 or including_emulation,
        "get_rng_state": lambda index=None: state,  # no generator exists, and no number is drawn
        "set_rng_state": lambda new_state, index=None: None,
        "synchronize": lambda index=None: None,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "current_stream": streams.current,
        "stream": streams.using,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", streams.current))
        # Autocast and GradScaler switch themselves off where CUDA is not available, with a warning alone.
        stack.enter_context(
            mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False)
        )
        # Optimizers and clipping take loops instead of the foreach kernels for subclasses of Tensor. The lists stay the
        # same objects: DTensor adds itself to them when it is first imported (2.13, distributed/tensor/__init__.py).
        for kinds in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
        # DDP's logger insists on timers, which only a build for the device has (2.13, c10d/logger.cpp).
        stack.enter_context(mock.patch.object(torch._C._distributed_c10d.Logger, "set_runtime_stats_and_log"))
        for name, answer in _OF_HOST_TENSORS.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, answer))
        stack.enter_context(FunctionsOf(device))
        yield


class EngineOnCuda(DispatchMode):
    """What C++ does on a GPU and leaves out for fake tensors. Enter it inside the fake tensor mode.

    The autograd engine adds up the gradients of a tensor that is used several times in place, but not those of
    subclasses, which fake tensors are (torch/csrc/autograd/input_buffer.cpp): half of them in memory twice. So do some
    formulas of the backward with the zeros that they fill.
    Kernels allocate workspaces inside.
    Attributes, both counts: `added`, of additions made in place; `convolutions`.
    """

    OWNERS = 3  # of a gradient's storage that only the engine holds: the tensor, and two here

    def __init__(self) -> None:
        super().__init__()
        self.added = self.convolutions = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        if func in _IN_PLACE and torch._C._current_graph_task_id() != -1 and _called_by_engine():
            old, new = args[0], args[1] if func is torch.ops.aten.add.Tensor else args[0]
            owners = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
            if owners <= self.OWNERS and old.shape == new.shape and old.dtype == new.dtype:
                self.added += func is torch.ops.aten.add.Tensor
                _IN_PLACE[func](old.detach(), *args[1:], **(kwargs or {}))
                return old
        if func is torch.ops.aten.convolution.default:
            self.convolutions += 1
        size = workspace_of_backward(func, args)
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda:0") if size else None
        result = func(*args, **(kwargs or {}))
        del workspace
        return result


def _called_by_engine() -> bool:
    """Whether no Python lies between the engine and the dispatch modes. Its device threads have no other frames."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name in _MODES or frame.f_code is _CALL):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def give_autograd_a_device() -> None:
    """Without a GPU, torch's engine has no device guard for the gradients of fake CUDA tensors. It gets a copy of the
    CPU's, which does nothing, with the answers of a single idle device; and CUDA's hooks say that it is built, and has
    no context.
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
    assert instance is not None, "an object"
    table = ctypes.c_void_p.from_address(instance)
    assert table.value is not None, "with virtual methods"
    before, length = 2, 160  # what the table has before its first method; more than any of them has
    copy = (ctypes.c_void_p * (before + length)).from_buffer_copy(
        ctypes.string_at(table.value - 8 * before, 8 * (before + length))
    )
    copy[before + place] = ctypes.addressof(ctypes.c_char.from_buffer(page))
    table.value = ctypes.addressof(copy) + 8 * before
    _kept.extend([page, copy])
