"""Draws in one launch each, on CUDA: which, and with what arguments the kernel of `kernels` is called for them.

The numbers are those of `filling` and `counter_based`, which take many launches of torch's kernels: bit for bit those
of uniform and Bernoulli distributions, of integers and of dropout; of normal and exponential ones up to the last bits
of logarithm, cosine and sine.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainapp.draws import counter_based
from trainapp.draws.counter_based import threshold_of_16_bits
from trainapp.draws.filling import Distribution
from trainapp.draws.kernel_trial import passes_trial
from trainapp.draws.layout import DrawLayout
from trainapp.torch_private import has_values

DEVICE_TYPES = {"cuda"}  # a test adds "cpu", for Triton's interpreter

# The elements of one program of the kernel, as rows and columns: of rows up to a width, and of wider ones.
NARROW_WIDTH = 128
NARROW_TILE = (32, 16)
WIDE_TILE = (2, 256)

_MAX_DIMENSIONS = 6  # of a target seen by sample, with the sample's rows
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TYPES = (*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class FusedDraw(NamedTuple):
    """A distribution as the kernel draws it."""

    function: str  # in `kernels`
    first: int  # the first argument; of a float, its bits
    second: int = 0
    probabilities: Tensor | None = None  # of each element


# --- which draws


def fused_draw(distribution: Distribution, target: Tensor, arguments: Sequence[Any]) -> FusedDraw | None:
    """Return the draw as the kernel does it, or None if it takes torch's kernels.

    Args:
        distribution: one of `counter_based`.
        target: the tensor to fill, with at least one element.
        arguments: of the distribution.
    """
    make_draw = _FUSED_DRAWS.get(distribution)
    if make_draw is None or not _can_be_filled(target):
        return None
    return make_draw(target, *arguments)


def can_drop(inputs: Tensor) -> bool:
    """Return whether dropout of these inputs is one launch."""
    return inputs.dtype in _FLOATS and inputs.numel() > 0 and _can_be_filled(inputs)


def _can_be_filled(tensor: Tensor) -> bool:
    return (
        tensor.device.type in DEVICE_TYPES
        and tensor.dtype in _TYPES
        and tensor.dim() < _MAX_DIMENSIONS
        and has_values(tensor)  # a trace launches nothing
        and _is_usable(tensor.device)
    )


def _uniform(target: Tensor, low: float = 0.0, high: float = 1.0) -> FusedDraw | None:
    if target.dtype not in _FLOATS:
        return None
    return FusedDraw("uniform", _bits_of(low), _bits_of(high - low))


def _normal(target: Tensor, mean: float = 0.0, std: float = 1.0) -> FusedDraw | None:
    if target.dtype not in _FLOATS:
        return None
    return FusedDraw("normal", _bits_of(mean), _bits_of(std))


def _exponential(target: Tensor, rate: float = 1.0) -> FusedDraw | None:
    if target.dtype not in _FLOATS:
        return None
    return FusedDraw("exponential", _bits_of(-1 / rate))


def _bernoulli(target: Tensor, p: float | Tensor = 0.5) -> FusedDraw | None:
    if isinstance(p, Tensor):
        if p.device != target.device or p.dtype not in _FLOATS:
            return None
        return FusedDraw("bernoulli_of_elements", 0, probabilities=p)
    threshold = threshold_of_16_bits(p)
    if threshold is None:
        return FusedDraw("bernoulli", _bits_of(p))
    return FusedDraw("bernoulli_of_16_bits", threshold)


def _integers(target: Tensor, low: int, high: int) -> FusedDraw | None:
    span = high - low
    return FusedDraw("integers", low, span) if 0 < span < 2**63 else None


def _integers_below(target: Tensor, high: int) -> FusedDraw | None:
    return _integers(target, 0, high)


_FUSED_DRAWS: dict[Distribution, Callable[..., FusedDraw | None]] = {
    counter_based.uniform: _uniform,
    counter_based.normal: _normal,
    counter_based.exponential: _exponential,
    counter_based.bernoulli: _bernoulli,
    counter_based.integers: _integers,
    counter_based.integers_below: _integers_below,
}


def _bits_of(number: float) -> int:
    """Return the bits of a double, as int64: Triton passes a float in 32 bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


# --- the launch


def fill(draw: FusedDraw, target: Tensor, layout: DrawLayout, sample_keys: Tensor, seed: int) -> Tensor:
    """Fill a tensor and return it. One launch, without other memory.

    Args:
        draw: what to fill it with.
        target: the tensor, of any strides.
        layout: where it has the samples.
        sample_keys: int64 [samples, 1].
        seed: int64, added to each key.
    """
    samples = len(sample_keys)
    source = draw.probabilities
    if source is not None:
        source = layout.split(source.expand_as(target), samples)
    _launch(draw, layout.split(target, samples), source, None, sample_keys, seed)
    return target


def dropout(inputs: Tensor, mask: Tensor, p: float, layout: DrawLayout, sample_keys: Tensor, seed: int) -> Tensor:
    """Fill the mask of what is kept, and return the result. One launch, without memory besides the result.

    Args:
        inputs: which `can_drop`.
        mask: `empty_like` them, of booleans.
        p: the probability to drop an element.
        layout: where the inputs have the samples.
        sample_keys: int64 [samples, 1].
        seed: int64, added to each key.
    """
    samples = len(sample_keys)
    result = torch.empty_like(inputs)  # with the strides of the mask
    draw = _bernoulli(mask, 1 - p)
    assert draw is not None, "every probability has a kernel"
    draw = draw._replace(second=_bits_of(1 / (1 - p)))
    result_by_sample = layout.split(result, samples)
    _launch(draw, result_by_sample, layout.split(inputs, samples), layout.split(mask, samples), sample_keys, seed)
    return result


def _launch(
    draw: FusedDraw, target: Tensor, source: Tensor | None, mask: Tensor | None, sample_keys: Tensor, seed: int
) -> None:
    """Launch the kernel on tensors seen by sample: [samples, rows, other dimensions]."""
    kernels = _kernels()
    width = target.shape[-1]
    rows = target.numel() // width
    strides = _padded(target.stride(), 0)
    source_strides = strides if source is None else _padded(source.stride(), 0)
    _, *row_sizes, _ = _padded(target.shape, 1)

    tile_rows, tile_columns = NARROW_TILE if width <= NARROW_WIDTH else WIDE_TILE
    programs = -(-rows // tile_rows) * -(-width // tile_columns)
    with torch.cuda.device_of(target):  # Triton launches on the current device
        kernels.draw[(programs,)](
            target,
            source,
            mask,
            sample_keys,
            seed,
            draw.first,
            draw.second,
            rows,
            width,
            *row_sizes,
            *strides,
            *source_strides,
            distribution=getattr(kernels, draw.function),
            enable_fp_fusion=False,
        )


@functools.cache
def _kernels() -> Any:
    from trainapp.draws import kernels  # imports Triton

    return kernels


def _padded(numbers: Sequence[int], value: int) -> list[int]:
    """Return the numbers of as many dimensions as the kernel has: it takes new ones before the last."""
    missing = _MAX_DIMENSIONS - len(numbers)
    return [*numbers[:-1], *[value] * missing, numbers[-1]]


# --- whether the device has it


@functools.cache
def _is_usable(device: torch.device) -> bool:
    """Return whether the kernel runs on the device, by a trial. Says once why it does not.

    The first draw asks, which is nearly always in the forwards before the first step.
    """
    return passes_trial(
        _try_kernel,
        device,
        "random numbers by sample are drawn by many kernels of torch instead of one of Triton's, which does not "
        "run here (%s); results are the same, steps with dropout are slower",
    )


def _try_kernel(device: torch.device) -> None:
    """Draw a few numbers as the kernel does. Raises an error if it cannot be built or is wrong."""
    keys = torch.arange(2)[:, None]
    expected = counter_based.uniform(keys, 0, 3, torch.float32, -0.3, 0.4)
    target = torch.empty(2, 3, dtype=torch.float32, device=device)  # a trial may make fp64 the default
    draw = _uniform(target, -0.3, 0.4)
    assert draw is not None, "floats are drawn"
    fill(draw, target, DrawLayout("uniform_", dimensions=2, axis=0), keys.to(device), seed=0)
    if target.tolist() != expected.tolist():  # waits for the device, once
        raise ArithmeticError("Triton computes other numbers")
