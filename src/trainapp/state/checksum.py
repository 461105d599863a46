"""Checksums of tensors' bits."""

import torch
from torch import Tensor

_PARTS = 64  # sums per tensor: opposite changes would cancel out in a single one


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return sums, modulo 2**64, of the tensor's bits in each part; the last sum is weighted by position, so that
    swapped elements are detected. Finds writes that leave the version unchanged.

    Two passes over its memory; copies the tensor only if it is not contiguous in memory, or holds conjugates or
    negatives. Checkpoints hold digests of adapters' bases made of them: other sums need another format.

    Returns:
        int64 [_PARTS + 1], on the tensor's device.
    """
    # View its bytes in the order of memory.
    tensor = tensor.detach().resolve_conj().resolve_neg()  # such as those of fft(x).conj()
    memory_order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # also for channels_last
    data = tensor.permute(memory_order).contiguous().reshape(-1).view(torch.uint8)
    bytes_in_words = len(data) // 8 * 8
    if data.storage_offset() % 8 and bytes_in_words:
        data = data.clone()  # words must start at a multiple of their size

    # One sum per part, and one that depends on the positions in the parts.
    words = data[:bytes_in_words].view(torch.int64)
    part_size = len(words) // _PARTS
    parts = words[: part_size * _PARTS].view(_PARTS, part_size)
    sums = parts.sum(1)
    positions = torch.arange(1, part_size + 1, device=words.device)
    weighted_sum = (parts.sum(0) * positions).sum().reshape(1)

    # The words after the last part, and the bytes after the last word, with weights of their own.
    remaining_words = words[part_size * _PARTS :]
    sums[: len(remaining_words)] += remaining_words * 3
    if bytes_in_words < len(data):
        remaining_bytes = data[bytes_in_words:]
        sums[-len(remaining_bytes) :] += remaining_bytes * 5
    return torch.cat([sums, weighted_sum])
