"""What an operation costs, relative to others on the same kind of device: enough to say what is dearest to recompute.

The unit is the time in which a byte of memory is read or written. Constants rather than measurements, so that every
rank, run and plan comes to the same choice.
"""

from typing import Any

from torch import Tensor
from torch.utils import flop_counter

from trainapp.torch_operators import ATTENTION_OPERATORS, FLOP_FORMULAS
from trainapp.torch_private import tree_leaves

# Floating-point operations in the time of a byte: about those of a core with AVX-512 in fp32, and of an A100 in bf16.
FLOPS_PER_BYTE = {"cpu": 8.0, "cuda": 150.0}
OPERATION = 50_000.0  # bytes in the time that any operation takes to start
SELECTION = 200_000.0  # in that which torch's two modes for selected operations add to each operation


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """The cost of one call, from shapes alone."""
    tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
    moved = 0.0 if func.is_view else float(sum(t.numel() * t.element_size() for t in tensors))
    device = next((t.device.type for t in tensors), "cpu")
    flops = flops_of(func, args, kwargs, result)
    return OPERATION + max(moved, flops / FLOPS_PER_BYTE.get(device, FLOPS_PER_BYTE["cuda"]))


def is_attention(func: Any) -> bool:
    """Whether the operator is a kernel of attention, forward or backward."""
    return func.overloadpacket.__name__.startswith(ATTENTION_OPERATORS)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of one call of a product, convolution or attention; 0 for all others."""
    formula = FLOP_FORMULAS.get(func.overloadpacket)
    try:
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=result))
        if not is_attention(func):
            return 0
        # torch 2.13 has no formula for the CPU's kernels of attention.
        is_backward = func.overloadpacket.__name__.endswith("backward")
        count = flop_counter.sdpa_backward_flop_count if is_backward else flop_counter.sdpa_flop_count
        return int(count(*[tensor.shape for tensor in args[: 4 if is_backward else 3]]))
    except Exception:  # formulas assert what their authors had in mind; nothing may fail for that
        return 0
