"""Matmuls, convolutions and attention in 16 bits, for CPUs without instructions for them.

A CPU with AVX2 alone (most laptops, many virtual machines) multiplies matrices in bf16 or fp16 10 to 150 times slower
than in fp32. Here these operators compute in fp32 on their 16-bit operands and round the result once, as hardware with
the instructions does. Results, and what autograd saves, stay in 16 bits. The fp32 copies exist only inside an operator,
like the scratch of torch's own kernels, which `memory.limit` does not count either.

`install_for` replaces the leaves of ATen through `torch.library`, as `draws` does, so that calls from C++ (nn.LSTM,
einsum) are reached, too. The other operators of a model (normalization, pooling, softmax, element-wise ones) are about
as fast in 16 bits as in 32 (benchmarks/precision_speed.py).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

REDUCED = (torch.bfloat16, torch.float16)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

# All have their factors among the first three arguments.
RETURNING = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "convolution_backward",
    ATTENTION,
    f"{ATTENTION}_backward",
    "mkldnn_rnn_layer",  # nn.LSTM under autocast, which ends in an error otherwise
    "mkldnn_rnn_layer_backward",
)
WRITING = ("mm.out", "addmm.out", "bmm.out", "baddbmm.out", "addmm_", "baddbmm_")  # compiled graphs call these, too


def is_native(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of the dtype with this CPU's own instructions for it."""
    if dtype not in REDUCED:
        return True
    short_name = "bf16" if dtype is torch.bfloat16 else "fp16"
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{short_name}_supported", None)
    if is_supported is None:  # a build without oneDNN, which has the kernels
        return False
    return bool(is_supported())


def install_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Emulate computation in the dtype on the device if it has no instructions for it. Return whether it is emulated.

    The operators stay replaced until the process ends, and every call of one then costs some microseconds more. So they
    are replaced by the first model that computes in 16 bits, on such a CPU, and never elsewhere.
    """
    if device.type != "cpu" or is_native(dtype):
        return False
    _replace_kernels()
    return True


@functools.cache
def _replace_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name in RETURNING + WRITING:
        original = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            library.impl(name, _emulated(name, original), "CPU", with_keyset=True)
    return library


def _emulated(name: str, original: Any) -> Callable[..., Any]:
    """Return the kernel in place of `original`, which computes in fp32 what this CPU cannot in 16 bits."""
    emulated_dtypes = {dtype for dtype in REDUCED if not is_native(dtype)}

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Pass on what needs no emulation, and what torch's own kernel refuses.
        dtype = args[0].dtype
        if dtype not in emulated_dtypes or _mixes_dtypes(args):
            return original.call_boxed(keyset, *args, **kwargs)

        # Compute in fp32.
        wide_args = [_widened(value, dtype) for value in args]
        wide_kwargs = {key: _widened(value, dtype) for key, value in kwargs.items()}
        result = original.call_boxed(keyset, *wide_args, **wide_kwargs)

        # Round the result, as this kind of operator returns it.
        if name in WRITING:
            target: Tensor = kwargs.get("out", args[0])
            return target.resize_(result.shape).copy_(result)
        if name == ATTENTION:
            output, log_sums = result
            return output.to(dtype), log_sums  # the logarithms of sums of exponentials are fp32 in 16 bits, too
        if isinstance(result, Tensor):
            return result.to(dtype)
        return tuple(_narrowed(value, dtype) for value in result)

    return kernel


def _mixes_dtypes(args: tuple[Any, ...]) -> bool:
    """Return whether the factors differ in dtype, which torch's kernel refuses."""
    return any(isinstance(factor, Tensor) and factor.dtype is not args[0].dtype for factor in args[1:3])


def _widened(value: Any, dtype: torch.dtype) -> Any:
    """Return tensors of the dtype in fp32, and everything else (a boolean mask, a stride) as it is."""
    if isinstance(value, Tensor) and value.dtype is dtype:
        return value.to(torch.float32)
    return value


def _narrowed(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a tensor in the dtype; a gradient that was not asked for (None) and an LSTM's workspace (bytes) as is."""
    if value is None or value.dtype is not torch.float32:
        return value
    return value.to(dtype)
