"""AdamW with states, and if need be parameters, in less than fp32."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainapp.optim.quantized import BLOCKS, SMALLEST, Kind, Moment, Quantizer, empty_moment
from trainapp.optim.stochastic_rounding import copy_rounded
from trainapp.rng import new_generator

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements that are computed in fp32 at a time, with six temporaries: 6 MiB on the CPU, where they stay in its caches,
# and 96 MiB elsewhere, where each operation has a cost of its own. A multiple of every block.
PIECES = {"cpu": 1 << 18}
PIECE = 1 << 22
StateDtype = Literal["bf16", "fp32", "8bit", "4bit"]


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) that computes in fp32 and stores its two moments in `state_dtype`.

    Complex and fp64 parameters have moments of their own dtype, and are updated in their own precision: complex ones as
    pairs of real and imaginary parts, as by torch's AdamW.

    What is stored in less than fp32 is rounded by chance (`stochastic_rounding`, `quantized`), the parameters too if
    they are bf16. The chance depends on the number of the step and on the parameter's place alone: a run repeats
    itself, also after a resume, all ranks round the same values alike, and the parameters may be updated in any order.
    The fused kernels of torch 2.13 are not used: on the CPU they refuse states of another dtype than the parameters',
    and on CUDA they round to nearest (torchtitan, docs/bf16_optimizer_states.md).
    """

    rounds_by_chance = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: StateDtype = "bf16",
    ):
        self._kind = state_dtype
        self._quantizers: dict[torch.device, tuple[Quantizer, Quantizer]] = {}
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._places = {p: place for place, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for device in {p.device for p in self._places} if self._kind in BLOCKS else ():
            kind = self._as_quantized()
            self._quantizers[device] = Quantizer(kind, False, device), Quantizer(kind, True, device)

    @property
    def state_form(self) -> str:
        """Of moments that are codes, not values: a checkpoint with others does not fit. Empty for values."""
        return self._kind if self._kind in BLOCKS else ""

    @property
    def tables(self) -> list[Tensor]:
        """What it needs, in addition to its state, to read it."""
        return [table for pair in self._quantizers.values() for quantizer in pair for table in quantizer.tables]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    device = parameter.device
                    if device not in generators:
                        generators[device] = new_generator(device)
                    self._update(parameter, group, generators[device])
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        state = self.state[parameter]
        if not state:
            self._allocate(parameter, state)
        state["step"] += 1
        # Below 2 ** 32 for long: the CPU's generator takes the lower half of a seed (ATen/core/MT19937RNGEngine.h).
        generator.manual_seed(state["step"] * 65_537 + self._places.setdefault(parameter, len(self._places)))
        assert parameter.grad is not None
        weight, gradient = _real(_local(parameter)), _real(_local(parameter.grad))
        mean, square = self._stored(parameter, state)
        dtype = _computed_in(weight)
        is_flat = all(t.is_contiguous() for t in (weight, gradient)) and mean.is_flat and square.is_flat
        for piece in _pieces(weight, is_flat):
            new_mean, new_square = mean.read(piece, weight), square.read(piece, weight)
            values = weight if piece is None else weight.view(-1)[piece]
            new_weight = values.to(dtype, copy=True)
            change = (gradient if piece is None else gradient.view(-1)[piece]).to(dtype, copy=True)
            _adamw(new_weight, change, new_mean, new_square, state["step"], group)
            mean.write(piece, new_mean, generator)
            square.write(piece, new_square, generator)
            copy_rounded(values, new_weight, generator)

    def allocate_state(self) -> None:
        """As the first step does, for all parameters: moments of 0."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._allocate(parameter, self.state[parameter])

    def _allocate(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        if self._kind in _DTYPES or parameter.numel() < SMALLEST or not has_moments_in_fewer_bits(parameter):
            dtype = _DTYPES.get(self._kind, torch.float32)
            dtype = dtype if has_moments_in_fewer_bits(parameter) else parameter.dtype
            state |= {name: torch.zeros_like(parameter, dtype=dtype) for name in _MOMENTS}
            return
        assert _local(parameter) is parameter, "shards are refused: config.excludes"
        for name in _MOMENTS:
            state[name], state[f"{name}_scale"] = empty_moment(
                parameter.numel(), self._as_quantized(), parameter.device
            )

    def _stored(self, parameter: Tensor, state: dict[str, Any]) -> "tuple[_Stored, _Stored]":
        if f"{_MOMENTS[0]}_scale" not in state:
            return _Plain(_real(_local(state[_MOMENTS[0]]))), _Plain(_real(_local(state[_MOMENTS[1]])))
        mean, square = (
            _Quantized(Moment(state[name], state[f"{name}_scale"], quantizer))
            for name, quantizer in zip(_MOMENTS, self._quantizers[parameter.device], strict=True)
        )
        return mean, square

    def _as_quantized(self) -> Kind:
        assert self._kind in BLOCKS
        return self._kind


def has_moments_in_fewer_bits(parameter: Tensor) -> bool:
    """Whether `AdamW` stores this parameter's moments in its `state_dtype`: not those of complex and fp64 ones."""
    return not parameter.is_complex() and parameter.dtype is not torch.float64


@dataclass(frozen=True)
class _Plain:
    """A moment as a tensor of its parameter's layout. piece: of the flat tensor; None: all of it, in its layout."""

    tensor: Tensor

    @property
    def is_flat(self) -> bool:
        return self.tensor.is_contiguous()

    def read(self, piece: slice | None, weight: Tensor) -> Tensor:
        return self._part(piece).to(_computed_in(weight), copy=True)

    def write(self, piece: slice | None, values: Tensor, generator: torch.Generator) -> None:
        copy_rounded(self._part(piece), values, generator)

    def _part(self, piece: slice | None) -> Tensor:
        return self.tensor if piece is None else self.tensor.view(-1)[piece]


@dataclass(frozen=True)
class _Quantized:
    """The same of a quantized one."""

    moment: Moment
    is_flat = True

    def read(self, piece: slice | None, weight: Tensor) -> Tensor:
        if piece is None:
            return self.moment.read(0, weight.numel()).view(weight.shape)
        return self.moment.read(piece.start, piece.stop)

    def write(self, piece: slice | None, values: Tensor, generator: torch.Generator) -> None:
        self.moment.write(piece.start if piece else 0, values.view(-1), generator)


_Stored = _Plain | _Quantized


def _adamw(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, group: dict[str, Any]) -> None:
    """In place, in the dtype of all four. The gradient is overwritten."""
    beta1, beta2 = group["betas"]
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = torch.sqrt(square, out=gradient).div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))


def _pieces(weight: Tensor, is_flat: bool) -> Iterator[slice | None]:
    """Slices of the flat tensors: temporaries stay small however large a parameter is. None: they are not flat."""
    if not is_flat:
        yield None
        return
    size, count = PIECES.get(weight.device.type, PIECE), weight.numel()
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _computed_in(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype is torch.float64 else torch.float32


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as the pairs of its real and imaginary parts, in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of an FSDP2 parameter."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
