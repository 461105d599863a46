"""A CUDA device that this machine does not have: what it is, and what a run on it does otherwise than on the CPU."""

import contextlib
import dataclasses
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from trainapp.assembly.components import Components
from trainapp.config.schema import Config, Parallel
from trainapp.errors import UserError
from trainapp.memory.live_tensors import Category
from trainapp.optim import precision
from trainapp.optim.precision import NonFiniteCheck
from trainapp.planning import pretend
from trainapp.planning.measured import Measured
from trainapp.planning.recorder import Breakdown
from trainapp.planning.simulated_ranks import world_of
from trainapp.torch_private import ASKS_DEVICE, DispatchMode
from trainapp.training.session import Session
from trainapp.units import bytes_text, parse_memory_size

MIB = 2**20
# name: MiB that torch reports as `total_memory`, and compute capability. Reports differ by up to some hundred MiB
# between drivers and boards: the lowest one in public, or an assumption below it.
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
CONTEXT = 512 * MIB  # of the driver and of the libraries' code, which no allocator counts
HEADROOM = 2**30  # as `memory.cuda.HEADROOM`, which a run without a limit leaves
COMMUNICATOR = 688 * MIB  # of NCCL per group of ranks, on A100s with NVLink (NVIDIA/nccl#964)
THREADS = 2  # that multiply matrices, each with a workspace of cuBLAS: the program's and the autograd engine's
BUILDING = "building"  # the phase before the first step
_CONVOLUTIONS = (
    "convolutions: what cuDNN needs for its algorithms is chosen on the device, and comes on top; plan with a smaller "
    "memory.limit to leave room for it"
)
_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class _NeverChecked(NonFiniteCheck):
    """On a GPU the first bad step is read when a step is logged: here there is none."""

    def check(self) -> None:
        """Nothing is read."""


@dataclass(frozen=True)
class AbsentGpu:
    """memory: bytes. on_cpu: traced on tensors of the CPU, with CUDA's rules, where CUDA's cannot be.

    What is planned are allocated bytes; `margin` of them leaves room for the allocator's cache, which was 1.04 to 1.29
    times what was live in public records.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    on_cpu: bool = False

    @property
    def device(self) -> torch.device:
        """Of the trace's tensors."""
        return torch.device("cpu") if self.on_cpu else torch.device("cuda", 0)

    @property
    def margin(self) -> float:
        """How far off a peak may be, as a share of it."""
        return 0.3 if self.on_cpu else 0.1

    @property
    def has_flash_attention(self) -> bool:
        """From Ampere on, which also computes in bf16 rather than emulate it."""
        return self.capability >= (8, 0)

    def as_on_the_cpu(self) -> "AbsentGpu":
        """The same, traced on the CPU."""
        return dataclasses.replace(self, on_cpu=True)

    def limit(self, config: Config) -> int:
        """The bytes that a run on the device may reserve: without `memory.limit`, what an otherwise unused one has."""
        if config.memory.limit is not None:
            return parse_memory_size(config.memory.limit, self.memory)
        groups = communicators_of(config.parallel) if world_of(config) > 1 else 0
        available = self.memory - CONTEXT - groups * COMMUNICATOR
        return available - min(HEADROOM, available // 8)

    def give_autograd_a_device(self) -> None:
        """Call before any backward, in which torch's engine counts the devices. Raises RuntimeError where it cannot."""
        if self.on_cpu:
            return
        if not pretend.can_pretend():
            raise RuntimeError("fake CUDA tensors need Linux on x86-64 or aarch64")
        pretend.give_autograd_a_device()

    @contextlib.contextmanager
    def pretended(self) -> Iterator[None]:
        """Entered before the fake tensor mode."""
        with contextlib.ExitStack() as stack:
            if not self.on_cpu:
                stack.enter_context(pretend.pretended(self.name, self.capability, self.memory))
            stack.enter_context(_Functions(self))
            yield

    def engine(self) -> AbstractContextManager[Any]:
        """Entered after the fake tensor mode and after what answers reads."""
        return contextlib.nullcontext() if self.on_cpu else _EngineOnCuda()

    def numerics(self, config: Config) -> precision.Precision:
        """Autocast and loss scaler as on the device."""
        return precision.build(config.precision, self.device)

    def fake(self, from_tensor: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """On the device."""
        return lambda tensor: from_tensor(tensor).to(self.device)

    def prepare(self, session: Session) -> None:
        """Replace what would read values."""
        scaled = session.state.precision.scaler.is_enabled()
        session.engine.nonfinite = _NeverChecked(session.config.train.nonfinite, self.device, scaled, lambda: None)

    def completed(self, found: Breakdown, session: Session) -> Breakdown:
        """With cuBLAS's workspaces (an excerpt of CublasHandlePool.cpp), and with the whole model that each rank of
        FSDP has in fp32 before it is sharded.
        """
        of_one = 32 * MIB if self.capability[0] in (9, 10, 12) or session.config.train.deterministic else 8320 * 2**10
        libraries, notes = THREADS * of_one, list(found.notes)
        phases = {name: size + libraries for name, size in found.phases.items()}
        model, parallel = session.state.model, session.config.parallel
        changed: dict[str, Any] = {"total": found.total + libraries, "phases": phases}
        changed["categories"] = found.categories | {"libraries": libraries}
        if any(isinstance(part, (nn.modules.conv._ConvNd)) for part in model.modules()):
            notes.append(_CONVOLUTIONS)
        whole = sum(p.numel() * max(4, p.dtype.itemsize) for p in model.parameters())  # a DTensor's numel is global
        if parallel.strategy == "fsdp" and not parallel.fsdp.meta_init and session.ranks.world > 1:
            changed["phases"] = {BUILDING: whole} | phases
            if whole > changed["total"]:
                changed |= {"total": whole, "phase": BUILDING, "module": "", "events": []}
                changed["categories"] = {Category.PARAMETERS.value: whole}
                notes.append(
                    f"each rank has the whole model on its device, {bytes_text(whole)}, before it is sharded; "
                    "parallel.fsdp.meta_init=true builds the shards alone"
                )
        return dataclasses.replace(found, **changed, notes=tuple(notes))


class MeasuredHere(Measured):
    """Real steps on the CPU, for a GPU that is not here and a model that cannot be traced."""

    margin = spare = 0.3

    def __init__(self, components: Components, world: int, device: torch.device, gpu: AbsentGpu):
        super().__init__(components, world, device)
        self.limit = gpu.limit  # type: ignore[method-assign]


# --- which device


def find(config: Config) -> AbsentGpu:
    """What `plan.device` names: one of DEVICES, or a memory and compute capability, such as `24GiB@8.9`.

    Raises UserError for any other name, for what no GPU has, and for settings that contradict it.
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
            f"plan.device={name}: unknown; known are {', '.join(DEVICES)}. Others are named by their memory and "
            "compute capability, such as plan.device=24GiB@8.9"
        )
    return AbsentGpu(name, memory, (int(version[1]), int(version[2])))


def spelled(properties: Any) -> str:
    """What `plan.device` calls a device with these properties, as torch reads them."""
    return f"{properties.total_memory}@{properties.major}.{properties.minor}"


def named(config: Config, own: torch.device | None) -> Config:
    """The configuration to plan in a process that sees no GPU. own: this machine's, where it is the one planned for."""
    device = config.plan.device or spelled(torch.cuda.get_device_properties(own))
    plan = dataclasses.replace(config.plan, device=device, world=world_of(config))
    return dataclasses.replace(config, plan=plan, train=dataclasses.replace(config.train, device="auto"))


def on_cpu(config: Config) -> Config:
    """The configuration with its data and numerics opened on the CPU."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))


def communicators_of(parallel: Parallel) -> int:
    """The groups for which a run has NCCL's buffers: that of all ranks, the shards', the replicas'."""
    of_shards = 2 if parallel.fsdp.replicas == 1 else 3
    return {"single": 0, "ddp": 1, "fsdp": of_shards}[parallel.strategy]


# --- what its kernels keep


def chosen_kernel(gpu: AbsentGpu, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> str:
    """ "flash", "efficient" or "math", a simplification of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. What
    cuDNN's keeps on H100 is what flash keeps: the output and one number per query in fp32.
    """
    enabled = torch.backends.cuda
    if q.dim() != 4 or 0 in q.shape or 0 in k.shape or q.dtype != k.dtype or q.dtype != v.dtype:
        return "math"
    same = q.size(-1) == k.size(-1) == v.size(-1)
    flash = enabled.flash_sdp_enabled() and gpu.has_flash_attention and q.dtype in _HALF
    if flash and mask is None and same and q.size(-1) <= 256:
        return "flash"
    if q.dtype == torch.bfloat16 and gpu.capability < (8, 0):
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
    """`F.scaled_dot_product_attention` of fake tensors as the device computes it, autocast included. Without CUDA,
    torch takes the plain product, which keeps all attention weights for the backward.
    """
    q, k, v, kind = query, key, value, query.device.type
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
        return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
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


# On a GPU these are one operation of cuDNN, which keeps a reserve that is known only there.
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# Of autocast's list of functions in fp32, those that keep activations and are not in the CPU's.
_IN_FP32 = (F.layer_norm, F.softmax, F.log_softmax, F.group_norm, torch.softmax, torch.log_softmax, F.cross_entropy)


class _Functions(torch.overrides.TorchFunctionMode):
    """Replaces attention, also where activation checkpointing recomputes it; on the CPU also CUDA's list of functions
    that autocast runs in fp32, and dropout, whose mask has a byte per element.
    """

    def __init__(self, gpu: AbsentGpu):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            first = args[0] if args else kwargs["query"]
            if first.device.type == self._gpu.device.type:
                return attention(self._gpu, *args, **kwargs)
        if func in _RECURRENT and args[0].device.type == "cuda":
            raise NotImplementedError(f"{func.__name__}: what cuDNN keeps of a recurrent layer is known only on a GPU")
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if self._gpu.on_cpu:
            if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
                args = (args[0].float() if args[0].dtype in _HALF else args[0], *args[1:])
            if func is F.dropout and (args[2:] or (kwargs.get("training", True),))[0]:
                return torch.native_dropout(args[0], (args[1:] or (kwargs.get("p", 0.5),))[0], True)[0]
        return func(*args, **kwargs)

    def _backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`loss.backward(...)`: the engine is called with this mode on, which is off while it handles a call."""
        given = torch.ones_like(loss) if gradient is None else gradient
        into = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        keeps = create_graph if retain_graph is None else retain_graph
        with self:
            _engine_run_backward(
                (loss,), (given,), keeps, create_graph, into, allow_unreachable=True, accumulate_grad=True
            )


_CALL = torch._ops.OpOverload.__call__.__code__  # by which a mode calls the next one
_MODES = ("__torch_dispatch__", "__torch_function__")  # a function mode sees the calls of dispatch modes, too
# The engine adds up gradients, and some of its formulas fill zeros, in place, but not for subclasses of Tensor, which
# fake tensors are (2.13, input_buffer.cpp and FunctionsManual.cpp): else they would be in memory twice.
_IN_PLACE: dict[Any, Any] = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_add.default: _aten.index_add_.default,
}
_OWNERS = 3  # of a gradient's storage that only the engine holds: the tensor, and two here


class _EngineOnCuda(DispatchMode):
    """What C++ does on a GPU and leaves out for fake tensors. Enter it inside the fake tensor mode."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return args[0].device
        if func in _IN_PLACE and torch._C._current_graph_task_id() != -1 and _called_by_engine():
            old, new = args[0], args[1] if func is _aten.add.Tensor else args[0]
            owners = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
            if owners <= _OWNERS and old.shape == new.shape and old.dtype == new.dtype:
                _IN_PLACE[func](old.detach(), *args[1:], **(kwargs or {}))
                return old
        size = _workspace_of_backward(func, args)
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


def _workspace_of_backward(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a fused attention's backward needs on top of its results: the gradient of q in fp32 and one number per
    query (mha_bwd in flash_attn/flash_api.cpp, attention_backward.cu). 0 for other operations.
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
