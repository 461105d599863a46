"""A CUDA device that this machine does not have: its properties, and how a run on it differs from one on the CPU."""

import contextlib
import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.memory.live_tensors import Category
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import world_of
from trainapp.torch_private import ASKS_DEVICE, DispatchMode, graph_task
from trainapp.training.engine import Engine
from trainapp.units import bytes_text, parse_memory_size

MIB = 2**20
# name: MiB that torch reports as `total_memory`, and compute capability. Reports differ by up to some hundred MiB
# between drivers and boards: the lowest published one, or an assumption below it.
DEVICES = {
    "t4-16gb": (15_079, (7, 5)),
    "v100-16gb": (16_130, (7, 0)),
    "v100-32gb": (32_494, (7, 0)),
    "a10-24gb": (22_515, (8, 6)),
    "a100-40gb": (40_326, (8, 0)),
    "a100-80gb": (81_038, (8, 0)),
    "rtx3090-24gb": (24_113, (8, 6)),
    "l4-24gb": (22_478, (8, 9)),
    "l40s-48gb": (45_495, (8, 9)),
    "rtx4090-24gb": (24_091, (8, 9)),
    "h100-80gb": (81_008, (9, 0)),
    "h200-141gb": (143_156, (9, 0)),
}
CONTEXT = 512 * MIB  # the driver's and libraries' code, which no allocator counts
HEADROOM = 2**30  # as `memory.cuda.HEADROOM`, which a run without a limit leaves
# NCCL's memory on A100s with NVLink (NVIDIA/nccl#964), per group of ranks: all, shards, replicas.
COMMUNICATOR = 688 * MIB
THREADS = 2  # with a cuBLAS workspace each: the program's and the autograd engine's
_CONVOLUTIONS = (
    "convolutions: cuDNN chooses its algorithms on the device, and their workspaces are not included; plan with a "
    "smaller memory.limit to leave room for them"
)
_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_ATTENTION = F.scaled_dot_product_attention
# Functions that CUDA's autocast computes in fp32, that keep activations and are not in the CPU's list.
_IN_FP32 = (
    *((F, name) for name in ("layer_norm", "softmax", "log_softmax", "group_norm", "cross_entropy")),
    *((torch, name) for name in ("softmax", "log_softmax")),
)


@dataclass(frozen=True)
class AbsentGpu:
    """memory: bytes. on_cpu: traced on CPU tensors with CUDA's rules, if CUDA tensors cannot be faked. margin: the
    relative error of a peak.

    The plan is in allocated bytes; `margin` of them leaves room for the allocator's cache, which was 1.04 to 1.29 times
    the live memory in public records.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    on_cpu: bool = False
    margin: float = 0.1

    @property
    def device(self) -> torch.device:
        """Of the trace's tensors."""
        return torch.device("cpu") if self.on_cpu else torch.device("cuda", 0)

    def limit(self, config: Config) -> int:
        """The bytes that a run on the device may reserve; without `memory.limit`, those of an unused device."""
        if config.memory.limit is not None:
            return parse_memory_size(config.memory.limit, self.memory)
        parallel = config.parallel
        groups = {"single": 0, "ddp": 1, "fsdp": 2 if parallel.fsdp.replicas == 1 else 3}[parallel.strategy]
        available = self.memory - CONTEXT - (groups * COMMUNICATOR if world_of(config) > 1 else 0)
        return available - min(HEADROOM, available // 8)

    @contextlib.contextmanager
    def pretended(self) -> Iterator[None]:
        """Enter before the fake tensor mode."""
        patches: list[Any] = [mock.patch.object(F, "scaled_dot_product_attention", functools.partial(attention, self))]
        if self.on_cpu:
            patches += [mock.patch.object(owner, name, _in_fp32(getattr(owner, name))) for owner, name in _IN_FP32]
            patches.append(mock.patch.object(F, "dropout", _dropout))
        else:
            patches.append(_visible(self.name, self.capability, self.memory))
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield

    def prepare(self, engine: Engine) -> None:
        """Prepare an engine. Raises NotImplementedError for a model whose kernels are known only on a GPU."""
        if not self.on_cpu and any(isinstance(part, nn.RNNBase) for part in engine.state.model.modules()):
            raise NotImplementedError("what cuDNN keeps for a recurrent layer is known only on a GPU")
        engine.nonfinite.check = lambda: None  # type: ignore[method-assign]  # reads when a step is logged

    def completed(self, found: Breakdown, engine: Engine, config: Config) -> Breakdown:
        """Add cuBLAS's workspaces (an excerpt of CublasHandlePool.cpp), and the whole fp32 model that each FSDP rank
        has before sharding.
        """
        model, parallel, notes = engine.state.model, config.parallel, list(found.notes)
        of_one = 32 * MIB if self.capability[0] in (9, 10, 12) or config.train.deterministic else 8320 * 2**10
        libraries = THREADS * of_one
        phases = {name: size + libraries for name, size in found.phases.items()}
        categories = found.categories | {"libraries": libraries}
        found = dataclasses.replace(found, total=found.total + libraries, phases=phases, categories=categories)
        if any(isinstance(part, (nn.modules.conv._ConvNd)) for part in model.modules()):
            notes.append(_CONVOLUTIONS)
        if parallel.strategy == "fsdp" and not parallel.fsdp.meta_init and engine.ranks.world_size > 1:
            whole = sum(p.numel() * max(4, p.dtype.itemsize) for p in model.parameters())  # a DTensor counts all ranks
            found = dataclasses.replace(found, phases={"building": whole} | found.phases)
            if whole > found.total:
                notes.append(
                    f"each rank has the whole model on its device, {bytes_text(whole)}, before it is sharded; "
                    "parallel.fsdp.meta_init=true builds only the shards"
                )
                categories = {Category.PARAMETERS.value: whole}
                found = dataclasses.replace(
                    found, total=whole, phase="building", module="", categories=categories, events=[]
                )
        return dataclasses.replace(found, notes=tuple(notes))


# --- which device


def find(config: Config) -> AbsentGpu:
    """The GPU named by `plan.device`: one of DEVICES, or a memory and compute capability, such as `24GiB@8.9`.

    Raises UserError for any other name, for impossible values, and for settings that contradict it.
    """
    name = str(config.plan.device)
    if config.train.device not in ("auto", "cuda"):
        raise UserError(
            f"plan.device={name} with train.device={config.train.device}: the plan would be for CUDA; use "
            "train.device=auto"
        )
    memory, capability = DEVICES.get(name, (0, (0, 0)))
    gpu = AbsentGpu(name, memory * MIB, capability) if memory else _unnamed(name)
    if gpu.limit(config) > gpu.memory:
        raise UserError(
            f"memory.limit={config.memory.limit}: plan.device={name} has {bytes_text(gpu.memory)}; use less, or a "
            "fraction"
        )
    return gpu


def _unnamed(name: str) -> AbsentGpu:
    size, _, capability = name.partition("@")
    version, memory = re.fullmatch(r"(\d+)\.(\d)", capability), 0
    with contextlib.suppress(ValueError):
        memory = parse_memory_size(size, 0)
    if not version or not memory:
        raise UserError(
            f"plan.device={name}: unknown; known devices are {', '.join(DEVICES)}. Name others by memory and "
            "compute capability, such as plan.device=24GiB@8.9"
        )
    return AbsentGpu(name, memory, (int(version[1]), int(version[2])))


def device_spec(device: torch.device) -> str:
    """The name of this machine's device in `plan.device`."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.total_memory}@{properties.major}.{properties.minor}"


def named(config: Config, own: torch.device) -> Config:
    """The configuration to plan for this machine's GPU in a process that does not see it."""
    plan = dataclasses.replace(config.plan, device=device_spec(own), world=world_of(config))
    return dataclasses.replace(config, plan=plan, train=dataclasses.replace(config.train, device="auto"))


def on_cpu(config: Config) -> Config:
    """The configuration with its data and numerics opened on the CPU."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))


# --- torch, as if it were here


class Idle:
    """Replaces `torch.cuda.Stream` and `torch.cuda.Event`: everything it waits for has already happened."""

    def __init__(self, *args: Any, **options: Any):
        """Accepts torch's arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: self


class _HostGenerator(torch.Generator):
    """A host generator that stands for any device's: no numbers are drawn from it."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


@contextlib.contextmanager
def _visible(name: str, capability: tuple[int, int], memory: int) -> Iterator[None]:
    """Inside the block, `cuda:0` appears as this device to code that builds and steps a run. Enter it outside of a fake
    tensor mode, after `give_autograd_a_device`.
    """
    properties = types.SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=memory)
    state = torch.zeros(16, dtype=torch.uint8)
    patches: list[Any] = [
        mock.patch.multiple(
            torch.cuda,
            current_device=lambda: 0,
            device_count=lambda: 1,
            get_device_properties=lambda index=None: properties,
            get_device_capability=lambda index=None: capability,
            is_bf16_supported=lambda including_emulation=True: capability >= (8, 0) or including_emulation,
            get_rng_state=lambda index=None: state,
            set_rng_state=lambda new_state, index=None: None,
            synchronize=lambda index=None: None,
            Stream=Idle,
            Event=Idle,
            current_stream=Idle,
            stream=lambda stream: contextlib.nullcontext(),
        ),
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
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # Optimizers and clipping use loops instead of foreach kernels for subclasses of Tensor. The lists must stay the
        # same objects: DTensor adds itself to them on its first import (2.13).
        for kinds in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
        yield


# --- activations that its kernels keep


def chosen_kernel(gpu: AbsentGpu, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> str:
    """ "flash", "efficient" or "math", a simplification of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    cuDNN's kernel on H100 keeps the same as flash: the output and one fp32 value per query.
    """
    enabled = torch.backends.cuda
    if q.dim() != 4 or 0 in q.shape or 0 in k.shape or q.dtype != k.dtype or q.dtype != v.dtype:
        return "math"
    same = q.size(-1) == k.size(-1) == v.size(-1)
    is_ampere = gpu.capability >= (8, 0)  # also computes in bf16 instead of emulating it
    flash = enabled.flash_sdp_enabled() and is_ampere and q.dtype in _HALF
    if flash and mask is None and same and q.size(-1) <= 256:
        return "flash"
    if q.dtype == torch.bfloat16 and not is_ampere:
        return "math"
    alignment = 8 if q.dtype in _HALF else 4
    aligned = q.size(-1) % alignment == 0 and v.size(-1) % alignment == 0
    trained_mask = mask is not None and mask.requires_grad
    known = q.dtype in (torch.float32, *_HALF)
    efficient = enabled.mem_efficient_sdp_enabled() and known and aligned and not grouped and not trained_mask
    return "efficient" if efficient else "math"


def attention(
    gpu: AbsentGpu,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of fake tensors as the device computes it, including autocast. Without CUDA,
    torch uses the plain product, which keeps all attention weights for the backward.
    """
    q, k, v, kind = query, key, value, query.device.type
    if kind != gpu.device.type:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled(kind):  # the operations below are not in its list; the function is
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (t.to(dtype) if t.dtype in (torch.float32, *_HALF) else t for t in (q, k, v))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    kernel = chosen_kernel(gpu, q, k, v, attn_mask, enable_gqa and q.size(1) != k.size(1))
    if kernel == "math":
        return _aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if gpu.on_cpu:  # the CPU's fused kernel keeps the same, without dropout
        return _ATTENTION(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    if kernel == "flash":
        width = q.size(-1)
        if width % 8:  # torch pads so that rows are aligned
            q, k, v = (F.pad(t, (0, 8 - width % 8)) for t in (q, k, v))
        result = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return result[..., :width]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            blocked = torch.zeros_like(attn_mask, dtype=q.dtype)
            attn_mask = blocked.masked_fill_(attn_mask.logical_not(), -float("inf"))
        attn_mask = attn_mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    return _aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, keeps, dropout_p, is_causal, scale=scale)[
        0
    ]


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function computed in fp32, as under CUDA's autocast."""

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tuple(map(widened, args)), {name: widened(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return cast


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout with a mask of one byte per element."""
    return torch.native_dropout(input, p, True)[0] if training else input


_CALL = torch._ops.OpOverload.__call__.__code__  # by which a mode calls the next one
# The engine adds up gradients, and some of its formulas fill zeros, in place, but not for subclasses of Tensor, which
# fake tensors are (2.13, input_buffer.cpp and FunctionsManual.cpp): else they would be in memory twice.
_IN_PLACE: dict[Any, Any] = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_add.default: _aten.index_add_.default,
}
_OWNERS = 3  # of a gradient's storage that only the engine holds: the tensor, and two here


class EngineOnCuda(DispatchMode):
    """Emulates what C++ does on a GPU but omits for fake tensors. Enter it after `MadeUpValues`."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        if func in _IN_PLACE and graph_task() != -1 and _called_by_engine():
            old, new = args[0], args[1] if func is _aten.add.Tensor else args[0]
            owners = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
            if owners <= _OWNERS and old.shape == new.shape and old.dtype == new.dtype:
                _IN_PLACE[func](old.detach(), *args[1:], **(kwargs or {}))
                return old
        if kwargs and kwargs.get("pin_memory"):  # needs a driver
            kwargs = {**kwargs, "pin_memory": False}
        size = _workspace_of_backward(func, args)
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda:0") if size else None
        result = func(*args, **(kwargs or {}))
        del workspace
        return result


def _called_by_engine() -> bool:
    """Whether no Python lies between the engine and the dispatch modes. Its device threads have no other frames."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_code is _CALL):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _workspace_of_backward(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a fused attention's backward needs in addition to its results: the gradient of q in fp32 and one value
    per query (mha_bwd in flash_attn/flash_api.cpp, attention_backward.cu). 0 for other operations.
    """
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        batch, heads, queries, width = args[1].shape
        return 4 * batch * heads * _up(queries, 128) * (_up(width, 32) + 1)
    if func is _aten._scaled_dot_product_efficient_attention_backward.default:
        batch, heads, queries, width = args[1].shape
        delta = args[0].numel() * 4 if args[1].dtype == torch.float32 else 0
        return 4 * batch * heads * _up(queries, 64) * _up(width, 64) + delta
    return 0


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
