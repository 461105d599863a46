"""Copies of tensors that share memory where the tensors do: views of a buffer, say, through which it is written.

And what tells whether a tensor is still what it was.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainapp.optim.updated_memory import bytes_of
from trainapp.torch_private import is_tracing, storage_id

_ALIGNED = 16  # bytes: the size of the largest elements
_SUMMED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32}
Key = TypeVar("Key", bound=Hashable)


def copies_of(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """A copy of each, detached, with its `requires_grad`; one copy of a tensor that has several keys."""
    different = {id(tensor): tensor for tensor in tensors.values()}
    copies: dict[int, Tensor] = {}
    if len(different) > 1 and not is_tracing():
        for group in _overlapping(list(different.values())):
            copies.update(_copied_together(group))
    for key, tensor in different.items():
        if key not in copies:
            copies[key] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return {key: copies[id(tensor)] for key, tensor in tensors.items()}


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether bits are equal; NaN counts as different. Waits for the device."""
    return a.layout is not torch.strided or torch.equal(a, b)


def sum_of(tensor: Tensor) -> str | None:
    """As text, in which NaN equals itself: tells most writes without the memory of a copy. Waits for the device."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype not in _SUMMED:
        return None
    return str(tensor.detach().sum().item())


def _overlapping(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Groups of tensors that share bytes."""
    by_storage = defaultdict(list)
    for tensor in tensors:
        if _is_plain(tensor):
            by_storage[storage_id(tensor.untyped_storage())].append(tensor)
    groups = []
    for several in by_storage.values():
        end = 0
        for tensor in sorted(several, key=lambda tensor: bytes_of(tensor).start) if len(several) > 1 else ():
            span = bytes_of(tensor)
            if not end or span.start >= end:
                groups.append([tensor])
            else:
                groups[-1].append(tensor)
            end = max(end, span.stop)
    return [group for group in groups if len(group) > 1]


def _is_plain(tensor: Tensor) -> bool:
    """Whether size, stride and offset say all about where its elements are."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_dense and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _copied_together(tensors: list[Tensor]) -> dict[int, Tensor]:
    """By id. Copies the bytes from the first to the last of them once."""
    spans = [bytes_of(tensor) for tensor in tensors]
    start, stop = min(span.start for span in spans), max(span.stop for span in spans)
    start -= start % _ALIGNED
    device = tensors[0].device
    storage = tensors[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, start, (stop - start,), (1,)).clone()
    copies = {}
    for tensor, span in zip(tensors, spans, strict=True):
        offset = (span.start - start) // tensor.itemsize
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        view.set_(whole.untyped_storage(), offset, tensor.shape, tensor.stride())
        copies[id(tensor)] = view.requires_grad_(tensor.requires_grad)
    return copies
