"""AdamW with states, and optionally parameters, in less than fp32: in bf16, or as codes of 8 or 4 bits.

Values in bf16 are rounded stochastically: up or down at random, unbiased. Rounding to nearest loses every change below
half of a bf16's last bit, 1/512 of the value: weights with small updates, and second moments with a decay of 0.999,
would not move. Stochastic rounding is right on average (Zamirai et al. 2020, arXiv:2010.06192).

Codes are made by `quantizer`.

torchao 0.18's optimizers (torchao/optim/adam.py) are not used: their step is always compiled, except under a dispatch
mode, where torch runs it uncompiled. A step whose memory is counted would differ in its last bits from its replay.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from trainapp.optim import fused_adamw
from trainapp.optim.quantizer import BLOCKS, Quantizer
from trainapp.torch_private import local

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MOMENTS = ("exp_avg", "exp_avg_sq")
SMALLEST = 4096  # elements: smaller parameters, such as norms and biases, keep moments in fp32
StateDtype = Literal["bf16", "fp32", "8bit", "4bit"]
# Elements computed in fp32 at a time, with their temporaries: up to 9 MiB on the CPU, where they stay in its caches,
# and 148 MiB elsewhere, where each operation has a fixed cost. A multiple of every block.
PIECE_SIZES = {"cpu": 1 << 18}
DEFAULT_PIECE_SIZE = 1 << 22
# By `state_dtype`, in numbers of fp32 per element of a piece: copies of weight, gradient and both moments, and what
# rounding needs.
_TEMPORARIES = {"fp32": 4.0, "bf16": 5.25, "8bit": 9.25, "4bit": 9.25}
_LAST_BIT = 1 << 16  # of bf16, in the bits of fp32


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) that computes in fp32 and stores its two moments in `state_dtype`.

    Values stored in less than fp32 are rounded stochastically, including bf16 parameters. The random numbers depend
    only on the step number and the parameter's index: a run is reproducible, also after a resume, all ranks round
    alike, and the parameters may be updated in any order. torch 2.13's fused kernels are not used: on the CPU they
    require states in the parameters' dtype, and on CUDA they round to nearest (torchtitan,
    docs/bf16_optimizer_states.md).

    Raises ValueError for complex and fp64 parameters.
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
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(p.is_complex() or p.dtype is torch.float64 for p in parameters):
            raise ValueError("complex and fp64 parameters would lose precision; use optimizer=adamw")
        self._device = parameters[0].device  # of all
        self._index = {parameter: index for index, parameter in enumerate(parameters)}
        self._state_dtype: Any = state_dtype

        # Moments in 8 or 4 bits are codes, with a quantizer for each moment.
        is_quantized = self._state_dtype in BLOCKS
        self.state_form = self._state_dtype if is_quantized else ""  # of codes: a checkpoint must match it
        self._quantizers: dict[str, Quantizer] = {}  # by moment
        self.tables: list[Tensor] = []  # the memory of the quantizers
        if is_quantized:
            for name in _MOMENTS:
                quantizer = Quantizer(state_dtype, name == "exp_avg_sq", self._device)
                self._quantizers[name] = quantizer
                self.tables.extend((quantizer.levels, quantizer.by_code))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
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

        # The rounding's random numbers depend on the step and the parameter alone.
        index = self._index.setdefault(parameter, len(self._index))

        assert parameter.grad is not None
        weight = local(parameter)
        gradient = local(parameter.grad)
        if fused_adamw.can_update(weight, gradient):
            mean = self._moment(state, "exp_avg")
            square = self._moment(state, "exp_avg_sq")
            fused_adamw.update(weight, gradient, mean, square, state["step"], index, group)
            return
        # The CPU's generator takes the lower half of a seed (ATen/core/MT19937RNGEngine.h): from step 65,536 on, a
        # parameter has numbers that another one has had so many steps before.
        generator.manual_seed(state["step"] * 65_537 + index)
        self._update_in_pieces(weight, gradient, state, group, generator)

    def _update_in_pieces(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        """Update a parameter by torch's kernels, in pieces, so that temporaries of large ones stay small."""
        flat_weight = weight.reshape(-1)
        flat_gradient = gradient.reshape(-1)
        size = PIECE_SIZES.get(weight.device.type, DEFAULT_PIECE_SIZE)
        for start in range(0, len(flat_weight), size):
            piece = slice(start, min(start + size, len(flat_weight)))
            # Computed in fp32, whatever the dtypes of moments, weight and gradient.
            moments = {name: self._read(state, name, piece) for name in _MOMENTS}
            new_weight = flat_weight[piece].to(torch.float32, copy=True)
            new_gradient = flat_gradient[piece].to(torch.float32, copy=True)
            _apply_adamw(new_weight, new_gradient, moments["exp_avg"], moments["exp_avg_sq"], state["step"], group)
            # Back to those dtypes, rounded stochastically.
            for name, values in moments.items():
                self._write(state, name, piece, values, generator)
            copy_rounded(flat_weight[piece], new_weight, generator)
        if not weight.is_contiguous():  # then `flat_weight` may be a copy
            weight.copy_(flat_weight.view(weight.shape))

    def _allocate(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Allocate the moments of a parameter, as zeros."""
        state["step"] = 0
        if self._state_dtype not in BLOCKS or parameter.numel() < SMALLEST:
            dtype = _DTYPES.get(self._state_dtype, torch.float32)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
            return

        # As codes, with their scales.
        assert local(parameter) is parameter, "shards are refused: config.excludes"
        for name in _MOMENTS:
            codes, scales = self._quantizers[name].empty(parameter.numel())
            state[name] = codes
            state[f"{name}_scale"] = scales

    def _moment(self, state: dict[str, Any], name: str) -> fused_adamw.Moment:
        stored = local(state[name])
        if f"{name}_scale" not in state:
            return fused_adamw.Moment(stored)
        return fused_adamw.Moment(stored, state[f"{name}_scale"], self._quantizers[name])

    def _read(self, state: dict[str, Any], name: str, piece: slice) -> Tensor:
        """Return a slice of a moment, flat, in fp32."""
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


def bytes_of_temporaries(elements: int, device: torch.device, state_dtype: StateDtype) -> float:
    """Return the bytes that the update of a parameter in fp32 by torch's kernels needs for a while.

    Args:
        elements: of the parameter.
        device: of the parameter.
        state_dtype: see `AdamW`.
    """
    piece = min(elements, PIECE_SIZES.get(device.type, DEFAULT_PIECE_SIZE))
    return 4 * piece * _TEMPORARIES[state_dtype]


def _apply_adamw(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, group: dict[str, Any]
) -> None:
    """Apply an AdamW update, in place. Overwrites the gradient.

    Args:
        weight: the weight, like all tensors in fp32.
        gradient: its gradient.
        mean: the first moment.
        square: the second moment.
        step: number of this step, from 1.
        group: the options.
    """
    beta1, beta2 = group["betas"]
    learning_rate = group["lr"]

    # The moments: moving averages of the gradient and of its square.
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    # The root of the second moment, in the gradient's memory. Both moments start at 0, which is corrected for.
    mean_correction = 1 - beta1**step
    root_correction = (1 - beta2**step) ** 0.5
    root = torch.sqrt(square, out=gradient)
    denominator = root.div_(root_correction).add_(group["eps"])

    weight.mul_(1 - learning_rate * group["weight_decay"])
    weight.addcdiv_(mean, denominator, value=-learning_rate / mean_correction)


def copy_rounded(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Copy the source to the target; into bf16, with stochastic rounding: on average, values equal the source's.

    Infinities and NaN are kept.

    Args:
        target: where to copy to.
        source: in fp32, of the target's shape. Its memory is overwritten if the target is bf16.
        generator: on their device.
    """
    # Add noise below bf16's last bit, and drop the bits below it: the sum carries into it with the right probability.
    if target.dtype is torch.bfloat16:
        is_nan = source.isnan()
        bits = source.view(torch.int32)
        noise = torch.randint(0, _LAST_BIT, source.shape, dtype=torch.int32, device=source.device, generator=generator)
        bits.add_(noise).bitwise_and_(-_LAST_BIT)  # now a bf16 in fp32: the copy below is exact
        source.masked_fill_(is_nan, torch.nan)  # whose bits may have overflowed
    target.copy_(source)
