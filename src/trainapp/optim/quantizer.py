"""Values stored as codes of 8 or 4 bits: one scale per block of values, and the number of a level per value.

The levels for 8 bits and the blocks are those of Dettmers et al. 2022 (arXiv:2110.02861). For 4 bits and without a zero
level for second moments, by which an update is divided: Li et al. 2023 (arXiv:2309.01507). Here, in addition, second
moments are stored as their roots, which halves their range, and values are rounded stochastically, so that slow
averages keep moving.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["8bit", "4bit"]
BLOCKS: dict[Kind, int] = {"8bit": 256, "4bit": 128}  # values that share a scale


class Quantizer:
    """Conversion of values to codes (uint8, flat, whole blocks), with a scale per block (fp32), its largest magnitude.

    Codes are read and written in slices that start at a block.

    Args:
        kind: the number of bits; one of 4 bits stores two codes in a byte, the first one in the low bits.
        of_roots: for second moments, which are stored as their roots and never read as 0.
        device: of the codes.

    Attributes:
        levels: the values in units of the scale, ascending.
        by_code: the same by code.
        number_of_zero: the place of the level 0 in `levels`; 0 if there is none.
    """

    def __init__(self, kind: Any, of_roots: bool, device: torch.device):
        self.kind = kind
        self.of_roots = of_roots
        self._block_size = BLOCKS[self.kind]
        self._codes_per_byte = 2 if kind == "4bit" else 1
        levels = _levels(kind, of_roots)
        self.levels = torch.tensor(levels, device=device)

        # A level's code is its distance from the level 0, modulo the number of codes: an empty state is all zeros.
        self.number_of_zero = 0
        if not of_roots:
            self.number_of_zero = levels.index(0.0)
        self._mask = 255 if kind == "8bit" else 15
        by_code = [0.0] * (self._mask + 1)
        for number, level in enumerate(levels):
            code = (number - self.number_of_zero) & self._mask
            by_code[code] = level
        self.by_code = torch.tensor(by_code, device=device)

    def empty(self, count: int) -> tuple[Tensor, Tensor]:
        """Return codes and scales of `count` zeros."""
        device = self.levels.device
        blocks = -(-count // self._block_size)  # rounded up
        size = blocks * self._block_size // self._codes_per_byte  # bytes
        codes = torch.zeros(size, dtype=torch.uint8, device=device)
        scales = torch.zeros(blocks, device=device)
        return codes, scales

    def read(self, codes: Tensor, scales: Tensor, piece: slice) -> Tensor:
        """Return the values of a slice, in fp32."""
        codes, scales = self._blocks(codes, scales, piece)
        if self.kind == "4bit":  # separate the two codes of each byte
            codes = torch.stack((codes & 15, codes >> 4), -1)

        # The codes' levels, times the scale of each block.
        values = self.by_code.index_select(0, codes.flatten().int())  # indexing by `[]` is 100 times slower on the CPU
        values.view(-1, self._block_size).mul_(scales)

        # Without what fills the last block.
        values = values[: piece.stop - piece.start]
        if self.of_roots:
            values.square_()
        return values

    def write(self, codes: Tensor, scales: Tensor, piece: slice, values: Tensor, generator: torch.Generator) -> None:
        """Store the values of a slice. Overwrites them."""
        codes, scales = self._blocks(codes, scales, piece)
        if self.of_roots:
            values.sqrt_()

        # Fill the last block with zeros.
        missing = -len(values) % self._block_size
        if missing:
            values = F.pad(values, (0, missing))

        # Divide each block by its largest magnitude; one of zeros by 1.
        blocks = values.view(-1, self._block_size)
        scales.copy_(blocks.abs().amax(-1, keepdim=True))
        blocks.div_(scales.masked_fill(scales == 0, 1))

        codes.copy_(self._encode(values, generator).view(codes.shape))

    def _blocks(self, codes: Tensor, scales: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        """Return views of a slice's codes [blocks, bytes of a block] and scales [blocks, 1]."""
        first = piece.start // self._block_size
        end = -(-piece.stop // self._block_size)
        codes_by_block = codes.view(len(scales), -1)
        return codes_by_block[first:end], scales[first:end, None]

    def _encode(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Round each value stochastically to one of its two neighbouring levels; return the codes. Overwrites values.

        Args:
            values: flat, in units of their scales.
            generator: on their device.
        """
        # The levels below and above each value.
        number_below = torch.bucketize(values, self.levels[1:-1], right=True, out_int32=True)
        level_below = self.levels.index_select(0, number_below)
        gap = self.levels.index_select(0, number_below + 1).sub_(level_below)

        # The chance of the one above is the value's relative distance from the one below: right on average.
        chance = values.sub_(level_below).div_(gap)
        is_above = torch.rand(chance.shape, device=chance.device, generator=generator).lt_(chance)

        # The code is the chosen level's distance from the level 0. Two codes of 4 bits share a byte.
        codes = is_above.to(torch.int32).add_(number_below)
        codes.sub_(self.number_of_zero).bitwise_and_(self._mask)
        codes = codes.to(torch.uint8)
        if self.kind == "4bit":
            return codes[::2] | codes[1::2] << 4
        return codes


def _levels(kind: Kind, of_roots: bool) -> list[float]:
    """Return the levels in ascending order: without 0 for roots, otherwise symmetric."""
    if kind == "8bit":
        return _dynamic_levels(8, of_roots)
    if of_roots:
        return [number / 16 for number in range(1, 17)]
    return _dynamic_levels(4, of_roots)


def _dynamic_levels(bits: int, of_roots: bool) -> list[float]:
    """Return the levels of arXiv:2110.02861: each power of ten has twice as many as the next smaller one.

    Stretched so that the largest are -1 and 1: beyond the last level, rounding would be biased.

    Args:
        bits: of a code.
        of_roots: twice as many levels, all positive; the lowest is a tenth of the next.
    """
    # Between two powers of ten, the levels are the centres of equal intervals.
    positive: list[float] = []
    for power in range(bits - 1):
        count = 2 ** (power + of_roots)
        width = 0.9 / count
        scale = 10.0 ** (power - bits + 2)
        for number in range(count):
            center = 0.1 + (number + 0.5) * width
            positive.append(center * scale)

    if of_roots:
        return [positive[0] / 10, *positive, 1.0]
    positive = [level / positive[-1] for level in positive]
    negative = [-level for level in reversed(positive)]
    return [*negative, 0.0, *positive]
