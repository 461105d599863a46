"""Updates of `low_precision.AdamW` in one launch each, on CUDA, without temporaries.

The arithmetic is that of `low_precision`; the random numbers of the rounding are other ones, of the step number, the
parameter's index and the element.
"""

import functools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.draws.kernel_trial import passes_trial
from trainapp.draws.splitmix64 import hashed, signed
from trainapp.optim.quantizer import BLOCKS, Quantizer
from trainapp.torch_private import has_values

DEVICE_TYPES = {"cuda"}  # a test adds "cpu", for Triton's interpreter
_BITS = {"8bit": 8, "4bit": 4}
_ELEMENTS = 1024  # of one program
_BLOCK_OF_NUMBERS = 256


class Moment(NamedTuple):
    """A moment of a parameter: numbers, or codes with their scales and quantizer."""

    values: Tensor
    scales: Tensor | None = None
    quantizer: Quantizer | None = None


def can_update(weight: Tensor, gradient: Tensor) -> bool:
    """Return whether the update of these is one launch."""
    return (
        weight.device.type in DEVICE_TYPES
        and weight.is_contiguous()
        and gradient.is_contiguous()
        and weight.numel() > 0
        and has_values(weight)  # a trace launches nothing
        and _is_usable(weight.device)
    )


def may_update_on(device: torch.device) -> bool:
    """Return whether updates on the device are one launch, as far as that is known without a trial."""
    return device.type in DEVICE_TYPES and find_spec("triton") is not None


def update(
    weight: Tensor, gradient: Tensor, mean: Moment, square: Moment, step: int, index: int, group: Mapping[str, Any]
) -> None:
    """Apply an AdamW update, in place. One launch, without other memory.

    Args:
        weight: the parameter, which `can_update`.
        gradient: its gradient.
        mean: the first moment.
        square: the second one, in the same form.
        step: number of this step, from 1.
        index: of the parameter.
        group: the options.
    """
    beta1, beta2 = group["betas"]
    learning_rate = group["lr"]
    bits = 0
    block = _BLOCK_OF_NUMBERS
    if mean.quantizer is not None:
        bits = _BITS[mean.quantizer.kind]
        block = BLOCKS[mean.quantizer.kind]
    rows = _ELEMENTS // block
    programs = -(-weight.numel() // (rows * block))
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _kernel()[(programs,)](
            weight,
            gradient,
            *_arguments(mean),
            *_arguments(square),
            key=signed(hashed(step, index)),
            count=weight.numel(),
            mean_share=1 - beta1,
            square_decay=beta2,
            square_share=1 - beta2,
            weight_factor=1 - learning_rate * group["weight_decay"],
            root_correction=(1 - beta2**step) ** 0.5,
            eps=group["eps"],
            step_size=learning_rate / (1 - beta1**step),
            LEVELS=(_level_count(mean), _level_count(square)),
            NUMBER_OF_ZERO=mean.quantizer.number_of_zero if mean.quantizer is not None else 0,
            BITS=bits,
            ROWS=rows,
            BLOCK=block,
        )


def _arguments(moment: Moment) -> tuple[Tensor | None, ...]:
    """Return values, scales, levels and levels by code."""
    if moment.quantizer is None:
        return moment.values, None, None, None
    return moment.values, moment.scales, moment.quantizer.levels, moment.quantizer.by_code


def _level_count(moment: Moment) -> int:
    return 0 if moment.quantizer is None else len(moment.quantizer.levels)


@functools.cache
def _kernel() -> Any:
    from trainapp.optim import adamw_kernel  # imports Triton

    return adamw_kernel.adamw


@functools.cache
def _is_usable(device: torch.device) -> bool:
    """Return whether the kernel runs on the device, by a trial. Says once why it does not."""
    return passes_trial(
        _try_kernel,
        device,
        "AdamW in low precision updates each parameter by many kernels of torch instead of one of Triton's, which "
        "does not run here (%s); steps are slower",
    )


def _try_kernel(device: torch.device) -> None:
    """Update a parameter of one element. Raises an error if the kernel cannot be built or is wrong."""
    weight = torch.ones(1, dtype=torch.float32, device=device)
    gradient = torch.ones_like(weight)
    group = {"betas": (0.9, 0.999), "lr": 0.5, "weight_decay": 0.0, "eps": 0.0}
    mean = Moment(torch.zeros_like(weight))
    square = Moment(torch.zeros_like(weight))
    update(weight, gradient, mean, square, step=1, index=0, group=group)
    if abs(weight.item() - 0.5) > 1e-5:  # waits for the device, once
        raise ArithmeticError("Triton computes another update")
