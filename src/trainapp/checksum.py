"""Checksums of tensors, for writes that move no version: through `.data`, through NumPy, through a pointer."""

import torch
from torch import Tensor

PARTS = 64  # sums per tensor: opposite changes would cancel out in a single one


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """int64 [PARTS + 1]: sums, modulo 2**64, of the tensor's bits in as many parts; the last weighs them by their place
    in a part, so that exchanged elements tell. Two passes over its memory; a copy of the tensor only where its memory
    is not one block, or holds conjugates or negatives.
    """
    flat = _flat(tensor.detach()).view(torch.uint8)
    whole = len(flat) // 8 * 8
    if flat.storage_offset() % 8 and whole:
        flat = flat.clone()
    words = flat[:whole].view(torch.int64)
    size = len(words) // PARTS
    parts = words[: size * PARTS].view(PARTS, size)
    sums = parts.sum(1)
    places = torch.arange(1, size + 1, device=words.device)
    by_place = (parts.sum(0) * places).sum().reshape(1)
    rest = words[size * PARTS :]
    sums[: len(rest)] += rest * 3
    if whole < len(flat):
        ends = flat[whole:]
        sums[-len(ends) :] += ends * 5
    return torch.cat([sums, by_place])


def _flat(tensor: Tensor) -> Tensor:
    """The elements [N], in the order of memory: a view for every dense layout, such as channels_last."""
    tensor = tensor.resolve_conj().resolve_neg()  # such as those of fft(x).conj()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tensor.permute(order).contiguous().reshape(-1)
