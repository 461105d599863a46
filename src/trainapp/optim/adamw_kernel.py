"""The kernel of `fused_adamw`, in Triton: the whole update of a parameter in one launch. Imported late, since Triton is
only there with CUDA.

It computes what `low_precision` does by 8 to 30 kernels of torch, with random numbers of its own for the rounding.
"""

import triton
import triton.language as tl

from trainapp.draws.kernels import random_word

LAST_BIT = tl.constexpr(1 << 16)  # of bf16, in the bits of fp32


# --- moments as numbers


@triton.jit
def _rounded(values, noise, dtype: tl.constexpr):
    """Return the values as `dtype`: in bf16 rounded stochastically, so that on average they stay the same.

    noise: random integers below `LAST_BIT`.
    """
    if dtype == tl.bfloat16:
        bits = (values.to(tl.int32, bitcast=True) + noise) & -LAST_BIT
        rounded = bits.to(tl.float32, bitcast=True)  # what bf16 can hold
        values = tl.where(values == values, rounded, values)  # NaN has bits that overflow
    return values.to(dtype)


# --- moments as codes


@triton.jit
def _read_codes(codes, scales, by_code, row, column, row_exists, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return values [ROWS, BLOCK] in fp32: the level of each code, times the scale of its block."""
    if BITS == 8:
        code = tl.load(codes + row * BLOCK + column, mask=row_exists, other=0)
    else:  # two codes in a byte, the first one in the low bits
        HALF: tl.constexpr = BLOCK // 2
        byte = tl.load(codes + row * HALF + tl.arange(0, HALF)[None, :], mask=row_exists, other=0)
        code = tl.join(byte & 15, byte >> 4).reshape(byte.shape[0], BLOCK)
    scale = tl.load(scales + row, mask=row_exists, other=0)
    return tl.load(by_code + code.to(tl.int32)) * scale


@triton.jit
def _write_codes(
    values,
    noise,
    codes,
    scales,
    levels,
    row,
    column,
    row_exists,
    LEVELS: tl.constexpr,
    NUMBER_OF_ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store values as the codes of neighbouring levels, chosen at random.

    Args:
        values: fp32 [ROWS, BLOCK].
        noise: random integers of 24 bits.
        codes: where to store the codes.
        scales: where to store the largest magnitude of each block.
        levels: in ascending order.
        row: the block, int64 [ROWS, 1].
        column: the place in the block, int64 [1, BLOCK].
        row_exists: whether there is such a block.
        LEVELS: the number of levels.
        NUMBER_OF_ZERO: the place of the level 0 among them.
        BITS: of a code.
        BLOCK: values with one scale.
    """
    # Divide each block by its largest magnitude; one of zeros by 1. NaN is kept.
    scale = tl.max(tl.abs(values), axis=1, keep_dims=True)
    has_nan = tl.max((values != values).to(tl.int32), axis=1, keep_dims=True)
    scale = tl.where(has_nan != 0, float("nan"), scale)
    tl.store(scales + row, scale, mask=row_exists)
    values = values / tl.where(scale == 0, 1.0, scale)

    # The last level that is not above each value, but for the largest one: by bisection.
    below = tl.zeros_like(values).to(tl.int32)
    for power in tl.static_range(BITS):
        candidate = below + ((1 << (BITS - 1)) >> power)
        is_level = candidate <= LEVELS - 2
        level = tl.load(levels + tl.where(is_level, candidate, 0))
        below = tl.where(is_level & (level <= values), candidate, below)

    # The chance of the level above is the value's relative distance from the one below.
    level_below = tl.load(levels + below)
    gap = tl.load(levels + below + 1) - level_below
    is_above = noise.to(tl.float32) * (1 / 16777216) < (values - level_below) / gap
    code = (below + is_above.to(tl.int32) - NUMBER_OF_ZERO) & ((1 << BITS) - 1)
    if BITS == 8:
        tl.store(codes + row * BLOCK + column, code.to(tl.uint8), mask=row_exists)
    else:
        HALF: tl.constexpr = BLOCK // 2
        first, second = tl.split(code.reshape(code.shape[0], HALF, 2))
        pointers = codes + row * HALF + tl.arange(0, HALF)[None, :]
        tl.store(pointers, (first | second << 4).to(tl.uint8), mask=row_exists)


# --- an update


@triton.jit
def _read_moments(mean, square, place, exists, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first moment, and the second, in fp32."""
    row, column, row_exists = place
    if BITS == 0:
        element = row * BLOCK + column
        first = tl.load(mean[0] + element, mask=exists, other=0).to(tl.float32)
        second = tl.load(square[0] + element, mask=exists, other=0).to(tl.float32)
    else:
        first = _read_codes(mean[0], mean[1], mean[3], row, column, row_exists, BITS, BLOCK)
        root = _read_codes(square[0], square[1], square[3], row, column, row_exists, BITS, BLOCK)
        second = root * root
    return first, second


@triton.jit
def _write_moments(
    mean,
    square,
    values,
    noise,
    place,
    exists,
    LEVELS: tl.constexpr,
    NUMBER_OF_ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the first moment, and the second one and its root, rounded stochastically."""
    row, column, row_exists = place
    first, second, root = values
    noise_of_mean, noise_of_square = noise
    if BITS == 0:
        element = row * BLOCK + column
        dtype: tl.constexpr = mean[0].dtype.element_ty
        tl.store(mean[0] + element, _rounded(first, noise_of_mean >> 8, dtype), mask=exists)
        tl.store(square[0] + element, _rounded(second, noise_of_square >> 8, dtype), mask=exists)
    else:
        first = tl.where(exists, first, 0.0)  # what fills the last block
        root = tl.where(exists, root, 0.0)
        _write_codes(
            first, noise_of_mean, mean[0], mean[1], mean[2], row, column, row_exists,
            LEVELS[0], NUMBER_OF_ZERO, BITS, BLOCK,
        )  # fmt: skip
        _write_codes(
            root, noise_of_square, square[0], square[1], square[2], row, column, row_exists,
            LEVELS[1], 0, BITS, BLOCK,
        )  # fmt: skip


@triton.jit
def _updated(old_weight, slope, first, second, options):
    """Return the new parameter, its moments and the root of the second one, all in fp32."""
    mean_share, square_decay, square_share, weight_factor, root_correction, eps, step_size = options
    # Moving averages of the gradient and of its square, as torch's `lerp` and `addcmul` compute them.
    if mean_share < 0.5:
        first = first + mean_share * (slope - first)
    else:
        first = slope - (slope - first) * (1 - mean_share)
    second = second * square_decay + square_share * slope * slope
    root = tl.sqrt_rn(second)
    weight = old_weight * weight_factor - step_size * first / (root / root_correction + eps)
    return weight, first, second, root


# --- the kernel


# Arguments, all tensors contiguous:
#     weight, gradient    a parameter and its gradient
#     mean, square        the two moments: numbers or, with BITS, codes
#     *_scales, *_levels, *_by_code    of codes: the scales of their blocks, and see `Quantizer`
#     key                 of the random numbers
#     count               elements of the parameter
#     mean_share          of the gradient in the first moment
#     square_decay        what remains of the second moment
#     square_share        of the squared gradient in it
#     weight_factor       what remains of the parameter
#     root_correction     of the second moment's root, which starts at 0
#     eps                 added to the corrected root
#     step_size           the rate, divided by the first moment's correction
#     LEVELS              the numbers of levels of the two moments
#     NUMBER_OF_ZERO      the place of the first moment's level 0
#     BITS                of the moments' codes; 0 for numbers
#     ROWS, BLOCK         blocks of one program, and elements of a block
@triton.jit(do_not_specialize=["key", "count"])
def adamw(
    weight,
    gradient,
    mean,
    mean_scales,
    mean_levels,
    mean_by_code,
    square,
    square_scales,
    square_levels,
    square_by_code,
    key: tl.int64,
    count: tl.int64,
    mean_share,
    square_decay,
    square_share,
    weight_factor,
    root_correction,
    eps,
    step_size,
    LEVELS: tl.constexpr,
    NUMBER_OF_ZERO: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a parameter and its two moments."""
    # Which elements.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    element = row * BLOCK + column
    exists = element < count
    place = (row, column, row * BLOCK < count)
    means = (mean, mean_scales, mean_levels, mean_by_code)
    squares = (square, square_scales, square_levels, square_by_code)

    # Their random bits: 16 for the parameter, 24 for each moment.
    word = random_word(key.to(tl.int64), element)
    noise_of_weight = (word >> 48).to(tl.int32)
    noise = (((word >> 24) & 0xFFFFFF).to(tl.int32), (word & 0xFFFFFF).to(tl.int32))

    # In fp32, whatever the dtypes are.
    old_weight = tl.load(weight + element, mask=exists, other=0).to(tl.float32)
    slope = tl.load(gradient + element, mask=exists, other=0).to(tl.float32)
    first, second = _read_moments(means, squares, place, exists, BITS, BLOCK)
    options = (mean_share, square_decay, square_share, weight_factor, root_correction, eps, step_size)
    new_weight, first, second, root = _updated(old_weight, slope, first, second, options)
    tl.store(weight + element, _rounded(new_weight, noise_of_weight, weight.dtype.element_ty), mask=exists)
    _write_moments(means, squares, (first, second, root), noise, place, exists, LEVELS, NUMBER_OF_ZERO, BITS, BLOCK)
