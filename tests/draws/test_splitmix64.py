"""One generator in three forms: integers, tensors of torch, arrays of NumPy."""

import numpy as np
import pytest
import torch

from trainapp.data import stateless_random
from trainapp.draws.counter_based import BLOCK, random_words
from trainapp.draws.splitmix64 import GAMMA, WORD_MASK, hashed, signed

STATE = 0x1234567890ABCDEF


def test_words_are_those_of_the_published_generator():
    """The first outputs of SplitMix64 from the state 0, as in its reference implementation."""
    words = random_words(torch.zeros(1, 1, dtype=torch.int64), 0, 3, torch.int64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [word & WORD_MASK for word in words[0].tolist()] == expected


def test_tensors_and_arrays_have_the_same_words():
    states = np.array([(STATE + number * GAMMA) % 2**64 for number in range(1, 9)], dtype=np.uint64)
    by_numpy = stateless_random.splitmix64(states).astype(np.int64).tolist()
    assert random_words(torch.tensor([[signed(STATE)]]), 0, 8, torch.int64)[0].tolist() == by_numpy


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_a_stream_in_pieces_is_the_stream(dtype):
    """Pieces begin at multiples of a block; a shorter stream is the beginning of a longer one."""
    keys = torch.tensor([[5], [-7]])
    block = BLOCK["cpu"]
    whole = random_words(keys, 0, block, dtype)
    assert torch.equal(random_words(keys, 0, 11, dtype), whole[:, :11])
    assert torch.equal(random_words(keys, 64, 9, dtype), whole[:, 64:73])
    later = random_words(keys, block, block, dtype)
    assert not torch.equal(later, whole)


def test_integers_of_any_size_and_sign_are_hashed():
    hashes = {hashed(0), hashed(1), hashed(-2), hashed(2**70), hashed(0, 1), hashed(1, 0)}
    assert len(hashes) == 6
    assert all(0 <= bits < 2**64 for bits in hashes)


def test_signed_reads_the_bits_as_int64():
    assert [signed(bits) for bits in (0, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5)] == [0, 2**63 - 1, -(2**63), -1, 5]
