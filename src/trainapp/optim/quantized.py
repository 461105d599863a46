"""Moments in 8 or 4 bits: one scale per block of values, and of each value the number of a level.

Dettmers et al. 2022 (arXiv:2110.02861) for 8 bits and blocks, Li et al. 2023 (arXiv:2309.01507) for 4 bits, and for
second moments without a level of zero, by which an update would be divided. What differs here: second moments are
stored as their roots, which halves their range, and values are rounded by chance, so that slow averages keep moving.

The optimizers of torchao 0.18 (torchao/optim/adam.py) are not used: their step is always compiled, except under a
dispatch mode, where torch runs it uncompiled. A step whose memory is counted would have other bits than its replay.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SMALLEST = 4096  # elements: smaller parameters, such as norms and biases, keep moments in fp32
Kind = Literal["8bit", "4bit"]
BLOCKS: dict[Kind, int] = {"8bit": 256, "4bit": 128}  # values that share a scale


def empty_moment(count: int, kind: Kind, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes (uint8, flat) and scales (fp32, one per block: its largest magnitude) of a moment of `count` zeros."""
    codes = torch.zeros(-(-count // _per_byte(kind)), dtype=torch.uint8, device=device)
    return codes, torch.zeros(-(-count // BLOCKS[kind]), device=device)


class Quantizer:
    """Stores values between -1 and 1 as codes. of_roots: values between 0 and 1, never read as 0."""

    def __init__(self, kind: Kind, of_roots: bool, device: torch.device):
        self.kind, self.of_roots = kind, of_roots
        if kind == "8bit":
            levels = _dynamic(8, of_roots)
        else:
            levels = [level / 16 for level in range(1, 17)] if of_roots else _dynamic(4, of_roots)
        self._levels = torch.tensor(levels, device=device)  # ascending
        self._zero = 0 if of_roots else levels.index(0.0)  # has code 0: an empty state is all zeros
        self._mask = 255 if kind == "8bit" else 15
        by_code = [0.0] * (self._mask + 1)
        for number, level in enumerate(levels):
            by_code[number - self._zero & self._mask] = level
        self._by_code = torch.tensor(by_code, device=device)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The levels, in order and by code."""
        return self._levels, self._by_code

    def decoded(self, codes: Tensor) -> Tensor:
        """In fp32."""
        if self.kind == "4bit":
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten()
        return self._by_code.index_select(0, codes.int())  # by `[]` it takes 100 times as long on the CPU

    def encoded(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Each value becomes one of its two neighbours, by chance, such that the mean is right. Overwrites the values.

        generator: on their device.
        """
        below = torch.bucketize(values, self._levels[1:-1], right=True, out_int32=True)
        lower = self._levels.index_select(0, below)
        gap = self._levels.index_select(0, below + 1).sub_(lower)
        share = values.sub_(lower).div_(gap)
        is_above = torch.rand(share.shape, device=share.device, generator=generator).lt_(share)
        codes = is_above.to(torch.int32).add_(below).sub_(self._zero).bitwise_and_(self._mask)
        codes = codes.to(torch.uint8)
        if self.kind == "4bit":
            codes = torch.cat((codes, codes.new_zeros(len(codes) % 2)))
            codes = codes[::2] | codes[1::2] << 4
        return codes


@dataclass(frozen=True)
class Moment:
    """A stored moment of one parameter; a second one's roots are stored. codes, scales: see `empty_moment`."""

    codes: Tensor
    scales: Tensor
    quantizer: Quantizer

    def read(self, start: int, stop: int) -> Tensor:
        """The values of elements [start, stop) in fp32. start: a multiple of the block."""
        values = self.quantizer.decoded(self.codes[self._bytes(start, stop)])[: stop - start]
        for block, scale in self._blocks(values, start):
            block.mul_(scale)
        return values.square_() if self.quantizer.of_roots else values

    def write(self, start: int, values: Tensor, generator: torch.Generator) -> None:
        """Store flat fp32 values from element `start` on. Overwrites them."""
        if self.quantizer.of_roots:
            values.sqrt_()
        for block, scale in self._blocks(values, start):
            largest = block.abs().amax(-1, keepdim=True)
            scale.copy_(largest)
            block.div_(largest.masked_fill_(largest == 0, 1))
        self.codes[self._bytes(start, start + len(values))] = self.quantizer.encoded(values, generator)

    def _bytes(self, start: int, stop: int) -> slice:
        per_byte = _per_byte(self.quantizer.kind)
        return slice(start // per_byte, -(-stop // per_byte))

    def _blocks(self, values: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Views [blocks, block] of the values with their scales [blocks, 1]; the last block may be short."""
        size = BLOCKS[self.quantizer.kind]
        whole, first = len(values) // size, start // size
        parts = []
        if whole:
            parts.append((values[: whole * size].view(whole, size), self.scales[first : first + whole, None]))
        if len(values) % size:
            parts.append((values[None, whole * size :], self.scales[first + whole : first + whole + 1, None]))
        return parts


def _per_byte(kind: Kind) -> int:
    return 2 if kind == "4bit" else 1


def _dynamic(bits: int, of_roots: bool) -> list[float]:
    """The levels of arXiv:2110.02861: per power of ten twice as many as for the next smaller one.

    Stretched such that the largest are -1 and 1: beyond the last level, values could not be right on average.
    Of roots: twice as many, all positive; the lowest is a tenth of the next.
    """
    upper: list[float] = []
    for power in range(bits - 1):
        count = 2 ** (power + of_roots)
        width = 0.9 / count
        upper += [(0.1 + (number + 0.5) * width) * 10.0 ** (power - bits + 2) for number in range(count)]
    if of_roots:
        return [upper[0] / 10, *upper, 1.0]
    upper = [level / upper[-1] for level in upper]
    return [*(-level for level in reversed(upper)), 0.0, *upper]
