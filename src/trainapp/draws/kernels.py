"""The kernels of `fused`, in Triton: a whole draw in one launch. Imported late, since Triton is only there with CUDA.

Each distribution is the function of `counter_based` with its name, for one element: the same words, and the same
roundings in the same order. So that rounding stays as it is written, compile with `enable_fp_fusion=False`: a product
and a sum that are contracted to one operation round once instead of twice.
"""

import math

import triton
import triton.language as tl

from trainapp.draws import fused, splitmix64
from trainapp.draws.filling import coordinate_step

GAMMA = tl.constexpr(splitmix64.GAMMA)
FACTOR_0 = tl.constexpr(splitmix64.FACTORS[0])
FACTOR_1 = tl.constexpr(splitmix64.FACTORS[1])
TWO_PI = tl.constexpr(2 * math.pi)

NARROW_WIDTH = tl.constexpr(fused.NARROW_WIDTH)
NARROW_TILE = tl.constexpr(fused.NARROW_TILE)
WIDE_TILE = tl.constexpr(fused.WIDE_TILE)
STEP_1 = tl.constexpr(coordinate_step(1))
STEP_2 = tl.constexpr(coordinate_step(2))
STEP_3 = tl.constexpr(coordinate_step(3))
STEP_4 = tl.constexpr(coordinate_step(4))


# --- words


@triton.jit
def random_word(key, number):
    """Return the word with this number, counted from 0, of the key's stream: int64 -> uint64."""
    word = key.to(tl.uint64, bitcast=True) + (number + 1).to(tl.uint64) * GAMMA
    word = (word ^ (word >> 30)) * FACTOR_0
    word = (word ^ (word >> 27)) * FACTOR_1
    return word ^ (word >> 31)


@triton.jit
def _random_part(key, element, WIDTH: tl.constexpr):
    """Return the element of a stream of integers of WIDTH bits: of a word, the lowest come first."""
    per_word: tl.constexpr = 64 // WIDTH
    shift = (element % per_word * WIDTH).to(tl.uint64)
    return random_word(key, element // per_word) >> shift


@triton.jit
def _random_bits(key, element, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return random integers of so many bits, as floats of `_computed_type(dtype)`."""
    if dtype == tl.float64:
        bits = (_random_part(key, element, 64) & ((1 << BITS) - 1)).to(tl.int64)
    else:
        bits = _random_part(key, element, 32).to(tl.int32) & ((1 << BITS) - 1)
    return bits.to(_computed_type(dtype))


@triton.constexpr_function
def _computed_type(dtype):
    """Return the type in which numbers of `dtype` are computed: in fp32 at least."""
    return tl.float64 if dtype == tl.float64 else tl.float32


@triton.constexpr_function
def _mantissa_bits(dtype):
    if dtype == tl.float64:
        return 53
    if dtype == tl.float16:
        return 11
    if dtype == tl.bfloat16:
        return 8
    return 24


@triton.constexpr_function
def _power_of_two(exponent):
    return 2.0**exponent


@triton.jit
def _unit(key, element, dtype: tl.constexpr):
    BITS: tl.constexpr = _mantissa_bits(dtype)
    return _random_bits(key, element, dtype, BITS) * _power_of_two(-BITS)


@triton.jit
def _open_unit(key, element, dtype: tl.constexpr):
    BITS: tl.constexpr = _mantissa_bits(_computed_type(dtype)) - 1
    return (_random_bits(key, element, dtype, BITS) + 0.5) * _power_of_two(-BITS)


@triton.jit
def _as_float(argument, dtype: tl.constexpr):
    """Return an argument that was passed as the bits of a double: a kernel's own arguments have at most 32 of them."""
    return argument.to(tl.int64).to(tl.float64, bitcast=True).to(_computed_type(dtype))


# --- distributions: (key, element, dtype of the numbers, two arguments) -> values


@triton.jit
def uniform(key, element, dtype: tl.constexpr, low, span):
    """Return numbers in [low, low + span)."""
    return _unit(key, element, dtype) * _as_float(span, dtype) + _as_float(low, dtype)


@triton.jit
def normal(key, element, dtype: tl.constexpr, mean, std):
    """Return normal numbers by the method of Box and Muller. Both elements of a pair compute its radius and angle."""
    first = element // 2 * 2
    logarithm = tl.log(_open_unit(key, first, dtype))
    if dtype == tl.float64:
        radius = tl.sqrt(logarithm * -2)
    else:
        radius = tl.sqrt_rn(logarithm * -2)  # in fp32, `sqrt` is approximate
    angle = _open_unit(key, first + 1, dtype) * TWO_PI
    value = tl.where(element == first, tl.cos(angle), tl.sin(angle)) * radius
    return value * _as_float(std, dtype) + _as_float(mean, dtype)


@triton.jit
def exponential(key, element, dtype: tl.constexpr, factor, _):
    """Return exponential numbers. factor: the negative inverse of the rate."""
    return tl.log(_open_unit(key, element, dtype)) * _as_float(factor, dtype)


@triton.jit
def bernoulli(key, element, dtype: tl.constexpr, p, _):
    """Return booleans that are true with the probability `p`."""
    return _unit(key, element, tl.float32) < _as_float(p, tl.float32)


@triton.jit
def bernoulli_of_16_bits(key, element, dtype: tl.constexpr, threshold, _):
    """Return booleans that are true where a signed integer of 16 bits is below the threshold."""
    bits = _random_part(key, element, 16).to(tl.uint16).to(tl.int16, bitcast=True)
    return bits.to(tl.int64) < threshold


@triton.jit
def bernoulli_of_elements(key, element, dtype: tl.constexpr, p, _):
    """Return booleans that are true with the probability that each element has."""
    return _unit(key, element, _computed_type(p.dtype)) < p


@triton.jit
def integers(key, element, dtype: tl.constexpr, low, span):
    """Return integers in [low, low + span)."""
    word = (random_word(key, element) & 0x7FFFFFFFFFFFFFFF).to(tl.int64, bitcast=True)
    return word % span.to(tl.int64) + low


# --- places


@triton.jit
def _tile(width, TILE: tl.constexpr):
    """Return the rows [ROWS, 1] and columns [1, COLUMNS] of this program, int64."""
    ROWS: tl.constexpr = TILE[0]
    COLUMNS: tl.constexpr = TILE[1]
    program = tl.program_id(0).to(tl.int64)
    programs_per_row = (width.to(tl.int64) + COLUMNS - 1) // COLUMNS
    row_tile, column_tile = _divided(program, programs_per_row)
    row = row_tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column


@triton.jit
def _coordinates(row, sizes):
    """Return the coordinates of rows: the sample, and four in the sample, of these sizes."""
    row, fourth = _divided(row, sizes[3])
    row, third = _divided(row, sizes[2])
    row, second = _divided(row, sizes[1])
    sample, first = _divided(row, sizes[0])
    return sample, first, second, third, fourth


@triton.jit
def _divided(number, size):
    """Return quotient and remainder. Most sizes are 1: a division of 64 bits takes as long as a word."""
    quotient = number
    if size > 1:
        quotient = number // size
    return quotient, number - quotient * size


@triton.jit
def _offset(coordinates, column, strides):
    """Return where the elements are, int64 [ROWS, COLUMNS]."""
    offset = coordinates[0] * strides[0] + coordinates[1] * strides[1] + coordinates[2] * strides[2]
    offset += coordinates[3] * strides[3] + coordinates[4] * strides[4]
    return offset + column * strides[5]


@triton.jit
def _row_key(sample_key, coordinates):
    """Return the key of each row's stream, as `filling` does."""
    key = sample_key + coordinates[1] * STEP_1 + coordinates[2] * STEP_2
    return key + coordinates[3] * STEP_3 + coordinates[4] * STEP_4


@triton.jit
def _store(pointers, value, exists):
    """Store values as torch converts them: to 16 bits by way of fp32."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if dtype == tl.float16 or dtype == tl.bfloat16:
        value = value.to(tl.float32)
    tl.store(pointers, value.to(dtype), mask=exists)


# --- the kernel


@triton.jit
def _draw_tile(
    tensors,
    sample_keys,
    numbers,
    extent,
    sizes,
    strides,
    source_strides,
    distribution: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draw the elements of one program. For the arguments see `draw`."""
    target, source, mask = tensors
    seed, first, second = numbers
    rows, width = extent
    dtype: tl.constexpr = target.dtype.element_ty

    # Which elements, where, and of which streams.
    row, column = _tile(width, TILE)
    exists = (row < rows) & (column < width)
    coordinates = _coordinates(row, sizes)
    offset = _offset(coordinates, column, strides)
    sample_key = tl.load(sample_keys + coordinates[0], mask=row < rows, other=0) + seed
    key = _row_key(sample_key, coordinates)

    if source is None:
        _store(target + offset, distribution(key, column, dtype, first, second), exists)
    else:
        source_value = tl.load(source + _offset(coordinates, column, source_strides), mask=exists, other=0)
        if mask is None:  # each element has its probability
            _store(target + offset, distribution(key, column, dtype, source_value, second), exists)
        else:  # dropout: products, as of torch's three tensors, for a dropped infinity is not a number
            computed: tl.constexpr = _computed_type(dtype)
            is_kept = distribution(key, column, dtype, first, second)
            _store(mask + offset, is_kept, exists)
            factor = is_kept.to(computed) * _as_float(second, dtype)
            _store(target + offset, source_value.to(computed) * factor, exists)


# No number becomes a part of the compiled kernel, as ones and multiples of 16 would by default.
_NUMBERS = ["seed", "first", "second", "rows", "width"]
_NUMBERS += [f"size_{dimension}" for dimension in range(1, 5)]
_NUMBERS += [f"{name}_{dimension}" for name in ("stride", "source") for dimension in range(6)]
_TENSORS = ["target", "source", "mask", "sample_keys"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TENSORS)
def draw(
    target,
    source,
    mask,
    sample_keys,
    seed: tl.int64,
    first: tl.int64,
    second: tl.int64,
    rows: tl.int64,
    width: tl.int64,
    size_1: tl.int64,
    size_2: tl.int64,
    size_3: tl.int64,
    size_4: tl.int64,
    stride_0: tl.int64,
    stride_1: tl.int64,
    stride_2: tl.int64,
    stride_3: tl.int64,
    stride_4: tl.int64,
    stride_5: tl.int64,
    source_0: tl.int64,
    source_1: tl.int64,
    source_2: tl.int64,
    source_3: tl.int64,
    source_4: tl.int64,
    source_5: tl.int64,
    distribution: tl.constexpr,
):
    """Fill `target`, seen by sample: [samples, rows of a sample, its other dimensions], padded to six dimensions.

    Args:
        target: the tensor to fill.
        source: None, the probabilities of `bernoulli_of_elements`, or the inputs of dropout.
        mask: None or, for dropout, where to put which inputs are kept, with the strides of `target`.
        sample_keys: of the samples, int64.
        seed: of the draw, added to each key.
        first: the distribution's first argument.
        second: its second one; for dropout, what to multiply kept inputs by.
        rows: the number of rows, of all samples.
        width: elements in a row.
        size_1: and the next, the sizes of the dimensions between the samples' and the last.
        stride_0: and the next, the strides of the target, in elements.
        source_0: and the next, the strides of the source.
        distribution: a function of this file.
    """
    sizes = (size_1, size_2, size_3, size_4)
    strides = (stride_0, stride_1, stride_2, stride_3, stride_4, stride_5)
    source_strides = (source_0, source_1, source_2, source_3, source_4, source_5)
    tensors = (target, source, mask)
    numbers = (seed, first, second)
    extent = (rows, width)
    if width <= NARROW_WIDTH:
        _draw_tile(tensors, sample_keys, numbers, extent, sizes, strides, source_strides, distribution, NARROW_TILE)
    else:
        _draw_tile(tensors, sample_keys, numbers, extent, sizes, strides, source_strides, distribution, WIDE_TILE)
