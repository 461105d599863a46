"""Operators whose results have sizes that no fake kernel knows: they are run for real, on zeros.

oneDNN keeps a workspace between the forward and the backward of an LSTM. Its size depends on sizes alone; torch's fake
kernel says 0 (torch/_meta_registrations.py, 2.13), which was 61% of one model's peak.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from trainapp.torch_private import outside_dispatch_modes

LARGEST = 64 * 2**20  # bytes that a probe may need; beyond that its result is extrapolated
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
PROBED = frozenset({_LSTM})


def with_real_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The results of an operation in PROBED, on fake tensors, with the workspace that the real one returns."""
    data, weights = args[0], args[1:5]
    steps, samples = data.shape[:2]  # batch_first or not: the operator gets its input transposed
    shapes = tuple(tuple(weight.shape) for weight in weights)
    # batch_sizes, of packed sequences, are left out: oneDNN gets none.
    settings = (args[7], *args[9:14], args[15], torch.is_grad_enabled())
    size = _bytes(int(steps), int(samples), int(data.shape[2]), shapes, data.dtype, settings)
    return (*result[:3], result[3].new_empty(size))


def _bytes(steps: int, samples: int, features: int, shapes: Any, dtype: torch.dtype, settings: Any) -> int:
    """As probed; where that would need more than LARGEST, on a line through two numbers of steps and in proportion to
    the samples, which leaves out how oneDNN rounds.
    """
    probe = functools.partial(_probed, features=features, shapes=shapes, dtype=dtype, settings=settings)
    some = min(samples, 16)
    few, more = min(steps, 32), min(steps, 64)
    size = probe(more, some)
    if more < steps:
        size += (size - probe(few, some)) * (steps - more) // (more - few)
    expected = size * samples // some
    return probe(steps, samples) if expected <= LARGEST else expected


@functools.cache
def _probed(steps: int, samples: int, *, features: int, shapes: Any, dtype: torch.dtype, settings: Any) -> int:
    """The workspace's bytes for so many steps and samples."""
    reverse, mode, hidden, layers, has_biases, bidirectional, train, keeps = settings
    with outside_dispatch_modes(), torch.set_grad_enabled(keeps):
        data = torch.zeros(steps, samples, features, dtype=dtype)
        weights = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        states = [torch.zeros(samples, hidden, dtype=dtype) for _ in range(2)]
        workspace: Tensor | None = _LSTM(
            data, *weights, *states, reverse, [], mode, hidden, layers, has_biases, bidirectional, False, train
        )[3]
        return 0 if workspace is None else workspace.untyped_storage().nbytes()
