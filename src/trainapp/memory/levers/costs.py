"""What an operation costs, relative to others on the same kind of device: enough to say what is dearest to recompute.

The unit is the time in which a byte of memory is read or written. Constants rather than measurements, so that every
rank, run and plan comes to the same choice.
"""

from typing import Any

from torch import Tensor

from trainapp.torch_operators import FLOP_FORMULAS
from trainapp.torch_private import tree_leaves

# Floating-point operations in the time of a byte: about those of a core with AVX-512 in fp32, and of an A100 in bf16.
FLOPS_PER_BYTE = {"cpu": 8.0, "cuda": 150.0}
OPERATION = 50_000.0  # bytes in the time that any operation takes to start
SELECTION = 200_000.0  # in that which torch's two modes for selected operations add to each operation


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """The cost of one call, from shapes alone."""
    tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    formula = FLOP_FORMULAS.get(func.overloadpacket)
    if formula is None:
        is_view = func.is_view
        return OPERATION + (0 if is_view else moved)
    flops = formula(*args, **kwargs, out_val=result)
    device = next((t.device.type for t in tensors), "cpu")
    return OPERATION + max(float(moved), flops / FLOPS_PER_BYTE.get(device, FLOPS_PER_BYTE["cuda"]))
