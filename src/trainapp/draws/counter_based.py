"""Random tensors from keys: a counter-based generator, SplitMix64, and the distributions made from its words.

Every function takes `keys`, int64 [k, 1], and returns [k, count]: the elements `first` to `first + count` of the
streams of these keys. An element depends on its key and its number in the stream alone, so a stream can be computed in
pieces that begin at any multiple of a block (`BLOCK`), and a longer one has the same first elements.

torch has no unsigned arithmetic, so words are int64: they wrap around as uint64 do, but are shifted with their sign.
"""

import functools
import math

import torch
from torch import Tensor

from trainapp.draws.splitmix64 import FACTORS, GAMMA, signed

# Elements drawn at a time, at most, by type of device: on the CPU they fit the cache, on a GPU launches are few.
BLOCK = {"cpu": 2**16, "cuda": 2**20}
_MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# --- words


def random_words(keys: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return uniform integers of `dtype`, all values of it; a word of 64 bits gives one, two or four elements."""
    elements_per_word = 8 // dtype.itemsize
    word_count = -(-count // elements_per_word)  # rounded up
    first_word = first // elements_per_word

    # SplitMix64: the state advances by a constant per word, and its hash is the word.
    states = keys + signed(first_word * GAMMA) + _word_steps(keys.device)[:word_count]
    return _hash_(states).view(dtype)[:, :count]


@functools.cache
def _word_steps(device: torch.device) -> Tensor:
    """Return what each word of a block adds to its key, int64 [BLOCK]."""
    with torch.inference_mode(False):  # the table is used outside of it, too
        return torch.arange(1, BLOCK[device.type] + 1, device=device) * signed(GAMMA)


def _hash_(words: Tensor) -> Tensor:
    """Hash int64 words in place, as `splitmix64.hashed` does in its last three lines."""
    shifted = torch.empty_like(words)
    _xor_shifted_(words, 30, shifted)
    words.mul_(signed(FACTORS[0]))
    _xor_shifted_(words, 27, shifted)
    words.mul_(signed(FACTORS[1]))
    _xor_shifted_(words, 31, shifted)
    return words


def _xor_shifted_(words: Tensor, shift: int, scratch: Tensor) -> None:
    """Compute `words ^= words >> shift`, of unsigned words."""
    torch.bitwise_right_shift(words, shift, out=scratch)
    scratch.bitwise_and_((1 << 64 - shift) - 1)  # the shift has filled the upper bits with the sign
    words.bitwise_xor_(scratch)


# --- distributions


def uniform(keys: Tensor, first: int, count: int, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return numbers in [low, high)."""
    unit = _unit(keys, first, count, dtype)
    if (low, high) == (0.0, 1.0):
        return unit
    return unit.mul_(high - low).add_(low)


def _unit(keys: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1) with all bits of the mantissa of `dtype`, as torch's; in fp32 at least."""
    bits = _MANTISSA_BITS[dtype]
    return _random_bits(keys, first, count, dtype, bits).mul_(2.0**-bits)


def _open_unit(keys: Tensor, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return numbers in (0, 1), for logarithms: the middles of intervals, hence with one bit less than `_unit`."""
    bits = _MANTISSA_BITS[dtype] - 1
    return _random_bits(keys, first, count, dtype, bits).add_(0.5).mul_(2.0**-bits)


def _random_bits(keys: Tensor, first: int, count: int, dtype: torch.dtype, bits: int) -> Tensor:
    """Return random integers of so many bits, as floats: `dtype`, or fp32 if that is wider."""
    word_dtype = torch.int64 if dtype is torch.float64 else torch.int32
    words = random_words(keys, first, count, word_dtype)
    return words.bitwise_and_((1 << bits) - 1).to(_at_least_fp32(dtype))


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.float32, dtype)


def normal(keys: Tensor, first: int, count: int, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Return normal numbers by the method of Box and Muller: a pair of neighbours in (0, 1) gives a pair of them."""
    # Pairs of uniform numbers.
    even_count = count + count % 2
    values = _open_unit(keys, first, even_count, _at_least_fp32(dtype))

    # Radius and angle of a point in the plane, whose coordinates are normal. A copy: of a single pair, `contiguous`
    # would be a view, which the first coordinate overwrites.
    radius = values[:, ::2].clone(memory_format=torch.contiguous_format).log_().mul_(-2).sqrt_()
    angle = values[:, 1::2] * (2 * math.pi)
    torch.mul(angle.cos(), radius, out=values[:, ::2])
    torch.mul(angle.sin_(), radius, out=values[:, 1::2])

    values = values[:, :count]
    if (mean, std) == (0.0, 1.0):
        return values
    return values.mul_(std).add_(mean)


def exponential(keys: Tensor, first: int, count: int, dtype: torch.dtype, rate: float = 1.0) -> Tensor:
    """Return exponential numbers, by the inverse of their distribution function."""
    return _open_unit(keys, first, count, _at_least_fp32(dtype)).log_().mul_(-1 / rate)


def bernoulli(keys: Tensor, first: int, count: int, dtype: torch.dtype, p: float | Tensor = 0.5) -> Tensor:
    """Return booleans that are true with probability `p`, a number or a tensor [k, count].

    For a number that is not extreme, 16 bits are compared: the probability is then off by at most 2**-17.
    """
    if isinstance(p, Tensor):
        return _unit(keys, first, count, _at_least_fp32(p.dtype)) < p
    threshold = threshold_of_16_bits(p)
    if threshold is None:
        return _unit(keys, first, count, torch.float32) < p
    return random_words(keys, first, count, torch.int16) < threshold


def threshold_of_16_bits(p: float) -> int | None:
    """Return the number below which a random integer of 16 bits, with its sign, is with probability `p`; None for an
    extreme one.
    """
    if 0.02 <= p <= 0.98:
        return round(p * 2**16) - 2**15
    return None


def integers(keys: Tensor, first: int, count: int, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Return integers in [low, high), int64."""
    words = random_words(keys, first, count, torch.int64)
    return words.bitwise_and_(2**63 - 1).remainder_(high - low).add_(low)


def integers_below(keys: Tensor, first: int, count: int, dtype: torch.dtype, high: int) -> Tensor:
    """Return integers in [0, high), int64."""
    return integers(keys, first, count, dtype, 0, high)
