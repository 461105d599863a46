"""Which attention kernel a GPU takes, and calling that kernel's operation on fake CUDA tensors.

Without CUDA, torch's own choice knows no GPU and takes the plain product, which keeps all attention weights for the
backward: with long contexts, the largest part of the memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from trainapp.planning.cuda.devices import Device

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def chosen_kernel(device: Device, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> str:
    """ "flash", "efficient" or "math", a simplification of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

    On H100 and later torch may prefer cuDNN's (with cuDNN above 9.15). It keeps what flash keeps, the output and one
    number per query in fp32, so that it counts as flash here.
    """
    enabled = torch.backends.cuda
    if q.dim() != 4 or 0 in q.shape or 0 in k.shape or q.dtype != k.dtype or q.dtype != v.dtype:
        return "math"
    same = q.size(-1) == k.size(-1) == v.size(-1)
    flash = enabled.flash_sdp_enabled() and device.has_flash_attention and q.dtype in _HALF
    if flash and mask is None and same and q.size(-1) <= 256:
        return "flash"
    if q.dtype == torch.bfloat16 and not device.has_bf16:
        return "math"
    alignment = 8 if q.dtype in _HALF else 4
    aligned = q.size(-1) % alignment == 0 and v.size(-1) % alignment == 0
    trained_mask = mask is not None and mask.requires_grad
    known = q.dtype in (torch.float32, *_HALF)
    efficient = enabled.mem_efficient_sdp_enabled() and known and aligned and not grouped and not trained_mask
    return "efficient" if efficient else "math"


def attention(
    device: Device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of fake CUDA tensors as the device computes it, autocast included."""
    if torch.is_autocast_enabled("cuda"):  # the operations below are not in its list; the function is
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = (t.to(dtype) if t.dtype in (torch.float32, *_HALF) else t for t in (q, k, v))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    kernel = chosen_kernel(device, q, k, v, attn_mask, enable_gqa and q.size(1) != k.size(1))
    if kernel == "math":
        return _aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
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
    arguments = (q, k, v, attn_mask, keeps, dropout_p, is_causal)
    return _aten._scaled_dot_product_efficient_attention(*arguments, scale=scale)[0]


# On a GPU these are one operation of cuDNN, which keeps a reserve that is known only there. Without it torch makes
# small ones of them: another figure, and no error.
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class FunctionsOf(torch.overrides.TorchFunctionMode):
    """Replaces attention of fake CUDA tensors, also where activation checkpointing recomputes it.

    Raises NotImplementedError for recurrent layers.
    """

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if query.device.type == "cuda":
                return attention(self._device, *args, **_renamed(kwargs))
        if func in _RECURRENT and args[0].device.type == "cuda":
            raise NotImplementedError(f"{func.__name__}: what cuDNN keeps of a recurrent layer is known only on a GPU")
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
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


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    short = {"query": "q", "key": "k", "value": "v"}
    return {short.get(name, name): value for name, value in kwargs.items()}


def workspace_of_backward(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a fused attention's backward needs on top of its results, which no meta kernel knows; 0 for others.

    Flash: the gradient of q in fp32 and one number per query (mha_bwd in flash_attn/flash_api.cpp). The efficient
    kernel: the same, in pieces; in fp32 also a product of output and gradient (attention_backward.cu). Estimates: not
    checked on a GPU.
    """
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        batch, heads, queries, width = args[1].shape
        rows = _up(queries, 128)
        return 4 * batch * heads * rows * (_up(width, 32) + 1)
    if func is _aten._scaled_dot_product_efficient_attention_backward.default:
        batch, heads, queries, width = args[1].shape
        delta = args[0].numel() * 4 if args[1].dtype == torch.float32 else 0
        return 4 * batch * heads * _up(queries, 64) * _up(width, 64) + delta
    return 0


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
