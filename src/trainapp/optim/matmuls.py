"""8-bit matmuls of linear layers: `precision=int8` and `precision=fp8`.

The output and the gradient of the inputs are 8-bit matmuls: every row of the left factor and every column of the right
one has its own scale and is rounded to nearest. A row belongs to one sample or token, so results do not depend on the
rest of the micro-batch. The rows of the weight's gradient run over all samples instead, so that matmul stays in bf16,
as in torchao's recipe "rowwise_with_gw_hp".

The kernels are torchao's; its modules are not used (0.18): Float8Linear follows only CUDA's autocast and wraps its
values in tensors that the counter of live tensors cannot see into; Int8MixedPrecisionTrainingLinear ignores autocast
and calls `view` on inputs and gradients of any layout.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainapp.errors import UserError
from trainapp.torch_private import int8_product, unsafe_view

Kind = Literal["int8", "fp8"]
MULTIPLE = 16  # fp8 kernels need it to divide both dimensions of a weight (torch 2.13, native/cuda/ScaledBlas.cpp)
# Rows that matmuls are padded to: cuBLAS needs at least 17 (torch 2.13, native/cuda/Blas.cpp, `_int_mm`), torchao's
# kernel at least 2 (0.18, prototype/quantized_training/int8_mm.py), and an expert may get none.
LEAST_ROWS = 32
LEAST_SCALE = 1e-30  # int8's smallest scale; torchao's default, 1e-12, would round gradients of small losses to 0


class QuantizedLinear(nn.Linear):
    """A linear layer with 8-bit matmuls. Its weight and bias, and their names, are those of nn.Linear."""

    kind: Kind

    def forward(self, input: Tensor) -> Tensor:  # the parameter's name in nn.Linear
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        output = _QuantizedMatmul.apply(input, self.weight, self.kind)
        if self.bias is None:
            return output
        return output + self.bias.to(output.dtype)


class _QuantizedMatmul(torch.autograd.Function):
    """The product input [..., K] @ weight [N, K].T. Like nn.Linear, it saves only what its gradients need."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, kind: Kind) -> Tensor:
        # The gradient of each factor needs the other one.
        needs_input_gradient, needs_weight_gradient, _ = ctx.needs_input_grad
        saved_input = input if needs_weight_gradient else None
        saved_weight = weight if needs_input_gradient else None
        ctx.save_for_backward(saved_input, saved_weight)
        ctx.kind = kind

        rows = input.reshape(-1, input.shape[-1])
        product = _multiply(rows, weight.to(input.dtype), kind)
        return unsafe_view(product, [*input.shape[:-1], len(weight)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # Rounding has no derivative. (torch's `once_differentiable` would silently drop the weight's.)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(
                f"precision={ctx.kind}: second derivatives (create_graph=True) cannot be computed through "
                f"{ctx.kind} matmuls; use precision=bf16"
            )

        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        input_gradient = None
        weight_gradient = None
        if weight is not None:
            transposed = weight.to(gradient.dtype).t()
            input_gradient = _multiply(rows, transposed, ctx.kind).view(*gradient.shape[:-1], len(transposed))
        if input is not None:  # in bf16: see the module
            weight_gradient = rows.t() @ input.reshape(-1, input.shape[-1])
        return input_gradient, weight_gradient, None


def _multiply(left: Tensor, right: Tensor, kind: Kind) -> Tensor:
    """Return left [M, K] @ right [N, K].T, in their dtype."""
    count = len(left)
    if count < LEAST_ROWS:
        left = F.pad(left, (0, 0, 0, LEAST_ROWS - count))
    return _KERNELS[kind](left, right)[:count]


def _multiply_int8(left: Tensor, right: Tensor) -> Tensor:
    from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise
    from torchao.prototype.quantized_training.int8_mixed_precision import scaled_int8_mm

    rows, row_scale = quantize_int8_rowwise(left, eps=LEAST_SCALE)
    columns, column_scale = quantize_int8_rowwise(right, eps=LEAST_SCALE)
    rows = rows.contiguous()
    columns = columns.contiguous()
    if left.device.type == "cuda":
        return scaled_int8_mm(rows, columns.t(), row_scale, column_scale)

    # Elsewhere, where torchao has no kernel: multiply the integers, then apply the scales.
    product = int8_product(rows, columns.t()).float()
    product.mul_(row_scale.float().unsqueeze(1))
    product.mul_(column_scale.float())
    return product.to(left.dtype)


def _multiply_fp8(left: Tensor, right: Tensor) -> Tensor:
    """Multiply with fast accumulation: partial sums have fewer bits than in fp32."""
    from torchao.float8.float8_ops import addmm_float8_unwrapped

    rows, row_scale = _fp8_rows(left)
    columns, column_scale = _fp8_rows(right)
    return addmm_float8_unwrapped(
        rows, row_scale, columns.t(), column_scale.t(), output_dtype=left.dtype, use_fast_accum=True
    )


def _fp8_rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor in float8_e4m3fn, and each row's factor [rows, 1].

    A factor is a power of two: only the values are rounded.
    """
    from torchao.float8.config import ScalingGranularity, e4m3_dtype
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(
        tensor,
        e4m3_dtype,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    rows = to_fp8_saturated(tensor.float() * scale, e4m3_dtype).contiguous()
    return rows, scale


_KERNELS: dict[Kind, Callable[[Tensor, Tensor], Tensor]] = {"int8": _multiply_int8, "fp8": _multiply_fp8}


def quantizable(blocks: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the linear layers in these blocks that support 8-bit matmuls: both dimensions are multiples of MULTIPLE.

    Subclasses of nn.Linear are excluded: their forward may differ.
    """
    layers: dict[nn.Linear, None] = {}  # a set in order: blocks may share a layer
    for block in blocks:
        for module in block.modules():
            if not isinstance(module, nn.Linear) or type(module) not in (nn.Linear, QuantizedLinear):
                continue
            fits_kernels = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
            if fits_kernels:
                layers[module] = None
    return list(layers)


def quantize(layers: Iterable[nn.Linear], kind: Kind) -> None:
    """Switch these layers to 8-bit matmuls, in place: parameters, their names and the layers' hooks stay."""
    for layer in layers:
        layer.__class__ = QuantizedLinear
        layer.kind = kind  # type: ignore[assignment]


def require_kernels(kind: Kind, device: torch.device) -> None:
    """Multiply two small matrices. Raises UserError without torchao, or if the device cannot multiply in `kind`."""
    try:
        ones = torch.ones(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16)
        _multiply(ones, ones, kind)
    except (ImportError, RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        advice = "use precision=bf16"
        if isinstance(error, ImportError):
            advice = f"pip install 'trainapp[torchao]', or {advice}"
        raise UserError(
            f"precision={kind}: {device} cannot multiply matrices in {kind} here ({reason}); {advice}"
        ) from error
