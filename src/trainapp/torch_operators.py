"""The private, underscored or undocumented parts of torch that tell one operator from another, each with its reason.

Used on torch 2.11 and 2.13; `tests/test_torch_private.py` tests each of them.
"""

import operator
from typing import Any

import torch
from torch.utils import flop_counter

# What `tensor.item()` and `bool(tensor)` dispatch to.
READ_OPERATORS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)

# tensor -> device. What C++ asks tensors without data for their device with (2.13, TensorImpl::device_custom): several
# times per operation, and through every mode. `tensor.device` gives the same answer at once.
ASKS_DEVICE = torch.ops.prim.device.default


def written_arguments(func: Any) -> tuple[bool, ...]:
    """Per positional argument of an operator such as aten.add_.Tensor, whether it writes to it."""
    infos = [argument.alias_info for argument in func._schema.arguments]  # no public way to ask
    return tuple(info is not None and info.is_write for info in infos)


# Operators that take random numbers only where they drop something, and are tagged in any case.
_MAY_DROP = ("attention", "sdp", "rnn", "lstm", "gru")


def draws_numbers(func: Any) -> bool:
    """Whether an operator takes numbers from a generator of torch. (OpOverload's `tags` are not documented.)"""
    tags = getattr(func, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not any(word in func.name() for word in _MAY_DROP)


# Attention kernels whose results selective activation checkpointing keeps. Every backend has an operator of its own.
ATTENTION_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


# (int8 [M, K], int8 [K, N]) -> int32 [M, N]. The only product of 8-bit integers that torch has on the CPU.
int8_product = torch._int_mm

# (tensor, shape) -> the same memory in another shape, which autograd takes for a tensor of its own: nn.Linear returns
# such a one. A view that a user's own function returns must not be changed in place.
unsafe_view = torch.ops.aten._unsafe_view.default

# Fused optimizers that write in place and return nothing. Torch has no meta kernel for them (2.13): fake tensors run
# them for real, on zeros of the size of the parameters.
FUSED_WITHOUT_META = frozenset({torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_})

# What `tensor.unique()` dispatches to.
UNIQUE = torch.ops.aten._unique2.default

# operator -> its schema: the names and defaults of arguments, and whether it writes into one of them.
schema_of = operator.attrgetter("_schema")

# By operator: `(*args, out_val, **kwargs) -> int`, the floating-point operations of a call. Its decorator is public.
FLOP_FORMULAS = flop_counter.flop_registry
