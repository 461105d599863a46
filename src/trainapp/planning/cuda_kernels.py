"""What CUDA's kernels and the autograd engine keep in memory on a GPU, for operations on fake or CPU tensors."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from trainapp.torch_private import ASKS_DEVICE, DispatchMode, graph_task

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALF)
_ATTENTION = F.scaled_dot_product_attention
# Functions that CUDA's autocast computes in fp32, that keep activations and are not in the CPU's list.
_IN_FP32 = (
    *((F, name) for name in ("layer_norm", "softmax", "log_softmax", "group_norm", "cross_entropy")),
    *((torch, name) for name in ("softmax", "log_softmax")),
)


def patches(capability: tuple[int, int], device_type: str) -> list[Any]:
    """Return context managers in which torch's functions keep what they keep on a GPU of this compute capability.

    Args:
        capability: of the GPU.
        device_type: "cuda" for fake CUDA tensors, "cpu" for CPU tensors that stand in for them.
    """
    attention_on_gpu = functools.partial(attention, capability, device_type)
    replacements: list[Any] = [mock.patch.object(F, "scaled_dot_product_attention", attention_on_gpu)]
    if device_type == "cpu":
        for owner, name in _IN_FP32:
            function_in_fp32 = _in_fp32(getattr(owner, name))
            replacements.append(mock.patch.object(owner, name, function_in_fp32))
        replacements.append(mock.patch.object(F, "dropout", _dropout))
    return replacements


# --- attention


def attention(
    capability: tuple[int, int],
    device_type: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` of fake tensors as the device does, including autocast. Without CUDA,
    torch uses the plain product, which keeps all attention weights for the backward.

    Args:
        capability: compute capability of the GPU.
        device_type: of the tensors that are meant to be on the GPU; others are computed as usual.
        query: [B, heads, queries, width]. This and the other arguments are torch's.
    """
    if query.device.type != device_type:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    # Autocast has the whole function in its list, but not the operations below.
    q = query
    k = key
    v = value
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (tensor.to(dtype) if tensor.dtype in _FLOATS else tensor for tensor in (q, k, v))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)

    # Each kernel keeps something else for the backward.
    is_grouped = enable_gqa and q.size(1) != k.size(1)
    kernel = chosen_kernel(capability, q, k, v, attn_mask, is_grouped)
    if kernel == "math":
        return _aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if device_type == "cpu":  # the CPU's fused kernel keeps the same, without dropout
        return _ATTENTION(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    if scale is None:
        scale = q.size(-1) ** -0.5
    if kernel == "flash":
        width = q.size(-1)
        if width % 8:  # torch pads so that rows are aligned; the tensors before it are freed
            q, k, v = (F.pad(tensor, (0, 8 - width % 8)) for tensor in (q, k, v))
        output = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :width]
    return _efficient_attention(q, k, v, attn_mask, dropout_p, is_causal, scale)


def chosen_kernel(
    capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_grouped: bool
) -> str:
    """Return "flash", "efficient" or "math", a simplification of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    cuDNN's kernel on H100 keeps the same as flash: the output and one fp32 value per query.
    """
    is_empty = 0 in q.shape or 0 in k.shape
    if q.dim() != 4 or is_empty or q.dtype != k.dtype or q.dtype != v.dtype:
        return "math"

    # Flash takes 16 bits, no mask, and heads of one width.
    has_bf16 = capability >= (8, 0)  # since Ampere; earlier GPUs emulate it
    flash_is_available = torch.backends.cuda.flash_sdp_enabled() and has_bf16 and q.dtype in _HALF
    has_equal_widths = q.size(-1) == k.size(-1) == v.size(-1)
    if flash_is_available and mask is None and has_equal_widths and q.size(-1) <= 256:
        return "flash"

    # The memory-efficient one takes fp32 and masks, too, but only aligned rows.
    if q.dtype == torch.bfloat16 and not has_bf16:
        return "math"
    efficient_is_available = torch.backends.cuda.mem_efficient_sdp_enabled() and q.dtype in _FLOATS
    alignment = 8 if q.dtype in _HALF else 4
    is_aligned = q.size(-1) % alignment == 0 and v.size(-1) % alignment == 0
    has_trained_mask = mask is not None and mask.requires_grad
    if efficient_is_available and is_aligned and not is_grouped and not has_trained_mask:
        return "efficient"
    return "math"


def _efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    # The kernel takes a mask that is added, of the weights' full shape.
    if mask is not None:
        if mask.dtype == torch.bool:
            zeros = torch.zeros_like(mask, dtype=q.dtype)
            mask = zeros.masked_fill_(mask.logical_not(), -float("inf"))
        mask = mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))

    has_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    outputs = _aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, has_backward, dropout_p, is_causal, scale=scale
    )
    return outputs[0]


# --- CUDA's rules on CPU tensors


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function computed in fp32, as under CUDA's autocast."""

    @functools.wraps(function)
    def compute_in_fp32(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return compute_in_fp32


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in _HALF:
        return value.float()
    return value


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute dropout with a mask of one byte per element."""
    if not training:
        return input
    return torch.native_dropout(input, p, True)[0]


# --- the autograd engine

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
        kwargs = kwargs or {}
        if func is ASKS_DEVICE:
            return args[0].device

        # In place if only the engine holds the tensor, as it does itself for tensors with data.
        if func in _IN_PLACE and graph_task() != -1 and _called_by_engine():
            target = args[0]
            second = args[1] if func is _aten.add.Tensor else target
            owners = torch._C._storage_Use_Count(target.untyped_storage()._cdata)
            if owners <= _OWNERS and target.shape == second.shape and target.dtype == second.dtype:
                _IN_PLACE[func](target.detach(), *args[1:], **kwargs)
                return target

        if kwargs.get("pin_memory"):  # needs a driver
            kwargs = {**kwargs, "pin_memory": False}

        # The workspace is live while the operation makes its results, and freed after it.
        workspace = None
        workspace_bytes = _workspace_of_backward(func, args)
        if workspace_bytes:
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device="cuda:0")
        result = func(*args, **kwargs)
        del workspace
        return result


def _called_by_engine() -> bool:
    """Return whether no Python lies between the engine and the dispatch modes. Its device threads have no other
    frames.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_code is _CALL):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _workspace_of_backward(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a fused attention's backward needs in addition to its results: the gradient of q in fp32
    and one value per query (mha_bwd in flash_attn/flash_api.cpp, attention_backward.cu). 0 for other operations.
    """
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        batch, heads, queries, width = args[1].shape
        rows = batch * heads * _rounded_up(queries, 128)
        numbers_per_row = _rounded_up(width, 32) + 1
        return 4 * rows * numbers_per_row
    if func is _aten._scaled_dot_product_efficient_attention_backward.default:
        batch, heads, queries, width = args[1].shape
        rows = batch * heads * _rounded_up(queries, 64)
        delta_bytes = 0
        if args[1].dtype == torch.float32:
            delta_bytes = 4 * args[0].numel()
        return 4 * rows * _rounded_up(width, 64) + delta_bytes
    return 0


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
