"""SplitMix64's constants and its hash of integers.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. The n-th word of a stream is
the hash of `state + n * GAMMA`: no earlier one is needed. `draws.counter_based` computes it on tensors, and
`data.stateless_random` on NumPy's arrays.
"""

GAMMA = 0x9E3779B97F4A7C15  # the step from word to word
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the multipliers of the hash
WORD_MASK = 2**64 - 1


def hashed(*numbers: int) -> int:
    """Return 64 well-mixed bits from integers."""
    bits = hash(numbers) & WORD_MASK
    bits = (bits ^ bits >> 30) * FACTORS[0] & WORD_MASK
    bits = (bits ^ bits >> 27) * FACTORS[1] & WORD_MASK
    return bits ^ bits >> 31


def signed(bits: int) -> int:
    """Return what int64 reads in the lowest 64 bits."""
    word = bits & WORD_MASK
    return word - 2**64 if word >= 2**63 else word
