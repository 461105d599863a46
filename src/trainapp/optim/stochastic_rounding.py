"""Rounding to bf16 up or down by chance, such that the mean is right.

Rounding to nearest loses every change below half of a bf16's last bit, 1/512 of the value: weights with small updates,
and second moments with a decay of 0.999, would stand still. By chance they move the right distance on average (Zamirai
et al. 2020, arXiv:2010.06192).
"""

import torch
from torch import Tensor

_LOW = 1 << 16  # what fp32 has below the last bit of bf16


def copy_rounded(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """`target.copy_(source)`; into bf16, each value is rounded up or down by chance: on average it is the source's.
    Infinities and NaN stay what they are.

    source: fp32, of the target's shape; its memory is overwritten if the target is bf16. generator: on their device.
    """
    if target.dtype is torch.bfloat16:
        bits = source.view(torch.int32)
        noise = torch.randint(0, _LOW, source.shape, dtype=torch.int32, device=source.device, generator=generator)
        bits.add_(noise).bitwise_and_(-_LOW)  # now a bf16 in fp32: the copy below is exact
    target.copy_(source)
