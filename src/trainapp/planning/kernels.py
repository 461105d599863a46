"""Where torch's fake kernels return other sizes than those of the CPU that they stand for, or are missing.

Found by comparing both on torch 2.13 (`benchmarks/fake_kernels.py`); its test compares these again.
"""

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_NORMS = (_aten.native_batch_norm.default, _aten.native_group_norm.default, _aten.native_layer_norm.default)
_GROUP_NORM_BACKWARD = _aten.native_group_norm_backward.default
_LSTM_BACKWARD = _aten.mkldnn_rnn_layer_backward.default
_LOSSES = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
)
CORRECTED = frozenset({*_NORMS, _GROUP_NORM_BACKWARD, _LSTM_BACKWARD, *_LOSSES})
_NONE = 0  # at::Reduction::None


def as_on_cpu(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The results of an operation in CORRECTED, with the sizes that the CPU's kernel gives them. Others are unchanged.

    Norms of a bf16 or fp16 input: the statistics that are kept for the backward have the precision of weights or
    running statistics in fp32, where the decompositions (torch/_refs/__init__.py, torch/_decomp/decompositions.py)
    give them that of the input. GroupNorm's backward: the input's gradient is like the input, there fp32.

    Losses that are reduced: the CPU writes the elements' losses into the result before it reduces them in place
    (aten/src/ATen/native/Loss.cpp), so that the scalar keeps the storage of all of them for as long as it lives.

    LSTM's backward: the biases have a gradient each (aten/src/ATen/native/mkldnn/RNN.cpp), which fake ones share.
    """
    if args[0].device.type != "cpu":
        return result
    if func in _LOSSES:
        position = 3 if func is _aten.binary_cross_entropy.default else 2
        if len(args) > position and args[position] == _NONE:
            return result
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return result.new_empty(max(1, elements)).as_strided((), ())
    if func is _LSTM_BACKWARD:
        return (*result[:4], torch.empty_like(result[4]), *result[5:])
    if func is _GROUP_NORM_BACKWARD:
        gradient = result[0]
        return (None if gradient is None else gradient.to(args[1].dtype), *result[1:])
    if any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in args[1:]):
        return (result[0], *(statistic.float() for statistic in result[1:]))
    return result
