"""AdamW with states, and optionally parameters, in less than fp32: in bf16, or as codes of 8 or 4 bits.

Values in bf16 are rounded stochastically: up or down at random, unbiased. Rounding to nearest loses every change below
half of a bf16's last bit, 1/512 of the value: weights with small updates, and second moments with a decay of 0.999,
would not move. Stochastic rounding is right on average (Zamirai et al. 2020, arXiv:2010.06192).

Codes have one scale per block of values and a level number per value: Dettmers et al. 2022 (arXiv:2110.02861) for 8
bits and blocks; Li et al. 2023 (arXiv:2309.01507) for 4 bits, and without a zero level for second moments, by
which an update is divided. Here, in addition, second moments are stored as their roots, which halves their range, and
values are rounded stochastically, so that slow averages keep moving.

torchao 0.18's optimizers (torchao/optim/adam.py) are not used: their step is always compiled, except under a dispatch
mode, where torch runs it uncompiled. A step whose memory is counted would differ in its last bits from its replay.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainapp.torch_private import local

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MOMENTS = ("exp_avg", "exp_avg_sq")
SMALLEST = 4096  # elements: smaller parameters, such as norms and biases, keep moments in fp32
Kind = Literal["8bit", "4bit"]
StateDtype = Literal["bf16", "fp32", "8bit", "4bit"]
BLOCKS: dict[Kind, int] = {"8bit": 256, "4bit": 128}  # values that share a scale
# Elements computed in fp32 at a time, with six temporaries: 6 MiB on the CPU, where they stay in its caches, and 96 MiB
# elsewhere, where each operation has a fixed cost. A multiple of every block.
PIECES = {"cpu": 1 << 18}
PIECE = 1 << 22
_LOW = 1 << 16  # the last bit of bf16 in fp32's bits


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) that computes in fp32 and stores its two moments in `state_dtype`. Raises ValueError for
    complex and fp64 parameters.

    Values stored in less than fp32 are rounded stochastically, including bf16 parameters. The random numbers depend
    only on the step number and the parameter's index: a run is reproducible, also after a resume, all ranks round
    alike, and the parameters may be updated in any order. torch 2.13's fused kernels are not used: on the CPU they
    require states in the parameters' dtype, and on CUDA they round to nearest (torchtitan,
    docs/bf16_optimizer_states.md).
    """

    rounds_by_chance = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state_dtype: StateDtype = "bf16",
    ):
        self._kind: Any = state_dtype
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._places = {p: place for place, p in enumerate(p for group in self.param_groups for p in group["params"])}
        if any(p.is_complex() or p.dtype is torch.float64 for p in self._places):
            raise ValueError("complex and fp64 parameters would lose precision; use optimizer=adamw")
        self._device = next(iter(self._places)).device  # of all
        names = _MOMENTS if self._kind in BLOCKS else ()
        self._quantizers = {name: Quantizer(state_dtype, name == "exp_avg_sq", self._device) for name in names}
        self.state_form = self._kind if names else ""  # of codes: a checkpoint must match it
        # Needed to read the state.
        self.tables = [table for own in self._quantizers.values() for table in (own.levels, own.by_code)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        generator = torch.Generator(self._device)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, generator)

    def _update(self, parameter: Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        state = self.state[parameter]
        if not state:
            self._allocate(parameter, state)
        state["step"] += 1
        # Below 2 ** 32 for long: the CPU's generator takes the lower half of a seed (ATen/core/MT19937RNGEngine.h).
        generator.manual_seed(state["step"] * 65_537 + self._places.setdefault(parameter, len(self._places)))
        assert parameter.grad is not None
        weight = local(parameter)
        flat, gradient = weight.reshape(-1), local(parameter.grad).reshape(-1)
        size = PIECES.get(weight.device.type, PIECE)  # keeps temporaries small for large parameters
        for start in range(0, len(flat), size):
            piece = slice(start, min(start + size, len(flat)))
            moments = {name: self._read(state, name, piece) for name in _MOMENTS}
            new_weight, change = (own[piece].to(torch.float32, copy=True) for own in (flat, gradient))
            _adamw(new_weight, change, moments["exp_avg"], moments["exp_avg_sq"], state["step"], group)
            for name, values in moments.items():
                self._write(state, name, piece, values, generator)
            copy_rounded(flat[piece], new_weight, generator)
        if not weight.is_contiguous():  # then `flat` may be a copy
            weight.copy_(flat.view(weight.shape))

    def _allocate(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        if self._kind not in BLOCKS or parameter.numel() < SMALLEST:
            dtype, layout = _DTYPES.get(self._kind, torch.float32), torch.contiguous_format
            state |= {name: torch.zeros_like(parameter, dtype=dtype, memory_format=layout) for name in _MOMENTS}
            return
        assert local(parameter) is parameter, "shards are refused: config.excludes"
        for name in _MOMENTS:
            state[name], state[f"{name}_scale"] = self._quantizers[name].empty(parameter.numel())

    def _read(self, state: dict[str, Any], name: str, piece: slice) -> Tensor:
        """A slice of a moment, flat, in fp32."""
        stored = local(state[name])
        if f"{name}_scale" not in state:
            return stored.view(-1)[piece].to(torch.float32, copy=True)
        return self._quantizers[name].read(stored, state[f"{name}_scale"], piece)

    def _write(
        self, state: dict[str, Any], name: str, piece: slice, values: Tensor, generator: torch.Generator
    ) -> None:
        """Store a slice. Overwrites the values."""
        stored = local(state[name])
        if f"{name}_scale" not in state:
            copy_rounded(stored.view(-1)[piece], values, generator)
        else:
            self._quantizers[name].write(stored, state[f"{name}_scale"], piece, values, generator)


def _adamw(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, group: dict[str, Any]) -> None:
    """An AdamW update, in place. Overwrites the gradient."""
    beta1, beta2 = group["betas"]
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = torch.sqrt(square, out=gradient).div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))


def copy_rounded(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """`target.copy_(source)`; into bf16, with stochastic rounding: on average, values equal the source's. Infinities
    and NaN are kept.

    source: fp32, of the target's shape; its memory is overwritten if the target is bf16. generator: on their device.
    """
    if target.dtype is torch.bfloat16:
        bits = source.view(torch.int32)
        noise = torch.randint(0, _LOW, source.shape, dtype=torch.int32, device=source.device, generator=generator)
        bits.add_(noise).bitwise_and_(-_LOW)  # now a bf16 in fp32: the copy below is exact
    target.copy_(source)


class Quantizer:
    """Stores values as codes (uint8, flat, whole blocks) with a scale per block (fp32), its largest magnitude. Read and
    written in slices that start at a block.

    of_roots: for second moments, which are stored as their roots and never read as 0. Attributes: the levels, in order
    and by code.
    """

    def __init__(self, kind: Any, of_roots: bool, device: torch.device):
        self.kind, self.of_roots = kind, of_roots
        self._block, self._per_byte = BLOCKS[self.kind], 2 if kind == "4bit" else 1
        if kind == "8bit":
            levels = _dynamic(8, of_roots)
        else:
            levels = [level / 16 for level in range(1, 17)] if of_roots else _dynamic(4, of_roots)
        self.levels = torch.tensor(levels, device=device)  # ascending
        self._zero = 0 if of_roots else levels.index(0.0)  # its code is 0, so an empty state is all zeros
        self._mask = 255 if kind == "8bit" else 15
        by_code = [0.0] * (self._mask + 1)
        for number, level in enumerate(levels):
            by_code[number - self._zero & self._mask] = level
        self.by_code = torch.tensor(by_code, device=device)

    def empty(self, count: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of `count` zeros."""
        blocks, device = -(-count // self._block), self.levels.device
        codes = torch.zeros(blocks * self._block // self._per_byte, dtype=torch.uint8, device=device)
        return codes, torch.zeros(blocks, device=device)

    def read(self, codes: Tensor, scales: Tensor, piece: slice) -> Tensor:
        """The values, in fp32."""
        codes, scales = self._blocks(codes, scales, piece)
        if self.kind == "4bit":
            codes = torch.stack((codes & 15, codes >> 4), -1)
        values = self.by_code.index_select(0, codes.flatten().int())  # indexing by `[]` is 100 times slower on the CPU
        values.view(-1, self._block).mul_(scales)
        values = values[: piece.stop - piece.start]
        return values.square_() if self.of_roots else values

    def write(self, codes: Tensor, scales: Tensor, piece: slice, values: Tensor, generator: torch.Generator) -> None:
        """Store the values. Overwrites them."""
        codes, scales = self._blocks(codes, scales, piece)
        if self.of_roots:
            values.sqrt_()
        if missing := -len(values) % self._block:  # of the last block
            values = F.pad(values, (0, missing))
        blocks = values.view(-1, self._block)
        scales.copy_(blocks.abs().amax(-1, keepdim=True))
        blocks.div_(scales.masked_fill(scales == 0, 1))
        codes.copy_(self._encoded(values, generator).view(codes.shape))

    def _blocks(self, codes: Tensor, scales: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        """Views of a slice's codes [blocks, bytes of a block] and scales [blocks, 1]."""
        blocks = slice(piece.start // self._block, -(-piece.stop // self._block))
        return codes.view(len(scales), -1)[blocks], scales[blocks, None]

    def _encoded(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Round each value stochastically to one of its two neighbouring levels. Overwrites the values."""
        below = torch.bucketize(values, self.levels[1:-1], right=True, out_int32=True)
        lower = self.levels.index_select(0, below)
        gap = self.levels.index_select(0, below + 1).sub_(lower)
        share = values.sub_(lower).div_(gap)
        is_above = torch.rand(share.shape, device=share.device, generator=generator).lt_(share)
        codes = is_above.to(torch.int32).add_(below).sub_(self._zero).bitwise_and_(self._mask)
        codes = codes.to(torch.uint8)
        return codes[::2] | codes[1::2] << 4 if self.kind == "4bit" else codes


def _dynamic(bits: int, of_roots: bool) -> list[float]:
    """The levels of arXiv:2110.02861: each power of ten has twice as many as the next smaller one.

    Stretched so that the largest are -1 and 1: beyond the last level, rounding would be biased.
    of_roots: twice as many, all positive; the lowest is a tenth of the next.
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
