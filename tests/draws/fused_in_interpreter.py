"""Draws by the fused kernel are those by torch's kernels. Run by test_fused.py in a process of its own, where
TRITON_INTERPRET makes Triton's kernels run on CPU tensors.
"""

import contextlib
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional as F

from trainapp.draws import fused, kernels, random_operations
from trainapp.draws.counter_based import random_words, uniform
from trainapp.draws.layout import DrawLayout
from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws
from trainapp.draws.splitmix64 import signed

SAMPLES = 4
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CUDAS_DROPOUT = "native_dropout"


@pytest.fixture(autouse=True, scope="module")
def _installed():
    """The operations, with that of dropout on CUDA."""
    random_operations.install("cpu")
    original = torch.library.get_kernel(f"aten::{CUDAS_DROPOUT}", "CPU")
    library = torch.library.Library("aten", "IMPL")
    replacement = random_operations._replacement(CUDAS_DROPOUT, original)
    library.impl(CUDAS_DROPOUT, replacement, "CPU", with_keyset=True)
    yield
    library._destroy()


@pytest.fixture
def launches(monkeypatch):
    """The fused draws and tensors of all launches."""
    calls = []
    launch = fused._launch

    def counted(*args):
        calls.append(args)
        launch(*args)

    monkeypatch.setattr(fused, "_launch", counted)
    return calls


@contextlib.contextmanager
def fused_on_cpu(on=True):
    fused.DEVICE_TYPES.clear()
    fused.DEVICE_TYPES.update({"cpu"} if on else set())
    fused._is_usable(torch.device("cpu"))
    yield
    fused.DEVICE_TYPES.clear()


def both_ways(draw, launches, layout=None, alike=False, expected_launches=1):
    """What a function draws by the kernel, and by torch's."""
    drawn = []
    for on in (True, False):
        record = DrawRecord(samples_come_first={"train"})
        if layout is not None:
            record.layouts = {"train": {0: layout}}
        with fused_on_cpu(on):
            launches.clear()
            with SampleDraws((0, 7), range(3, 3 + SAMPLES), record, "train", alike=alike):
                drawn.append(draw())
            assert len(launches) == (expected_launches if on else 0)
        assert not record.depends
    return drawn


def assert_equal(by_kernel, by_torch):
    assert by_kernel.dtype is by_torch.dtype
    assert by_kernel.stride() == by_torch.stride()
    if by_torch.dtype is torch.bfloat16:  # the interpreter cuts the last bits off, a GPU rounds
        assert (by_kernel - by_torch).abs().max() <= by_torch.abs().max() * 2**-7
    else:
        assert torch.equal(by_kernel, by_torch)


EXACT = {
    "uniform": lambda x: x.uniform_(),
    "uniform in a range": lambda x: x.uniform_(-0.3, 0.4),
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "rare bernoulli": lambda x: x.bernoulli_(0.01),
    "bernoulli of elements": lambda x: x.bernoulli_(
        torch.linspace(0.1, 0.9, x[0].numel(), dtype=x.dtype).view(x[0].shape)
    ),
    "integers": lambda x: x.random_(-5, 1000),
    "integers below": lambda x: x.random_(3),
}
ROUNDED = {
    "normal": lambda x: x.normal_(),
    "normal with a mean": lambda x: x.normal_(1.5, 3.0),
    "exponential": lambda x: x.exponential_(),
    "exponential with a rate": lambda x: x.exponential_(3.0),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", EXACT)
def test_bit_for_bit(kind, dtype, launches):
    assert_equal(*both_ways(lambda: EXACT[kind](torch.empty(SAMPLES, 3, 19, dtype=dtype)), launches))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ROUNDED)
def test_up_to_the_last_bits(kind, dtype, launches):
    """Of logarithm, cosine and sine, a few units; of the 16-bit types the last."""
    by_kernel, by_torch = both_ways(lambda: ROUNDED[kind](torch.empty(SAMPLES, 3, 33, dtype=dtype)), launches)
    difference = (by_kernel.double() - by_torch.double()).abs().max()
    assert difference <= 4 * torch.finfo(dtype).eps * by_torch.double().abs().max()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integer_types(dtype, launches):
    assert_equal(*both_ways(lambda: torch.empty(SAMPLES, 19, dtype=dtype).bernoulli_(0.3), launches))
    assert_equal(*both_ways(lambda: torch.empty(SAMPLES, 19, dtype=dtype).random_(0, 2), launches))
    p = torch.rand(SAMPLES, 19, dtype=torch.float64)
    assert_equal(*both_ways(lambda: torch.empty(SAMPLES, 19, dtype=dtype).bernoulli_(p), launches))


def test_large_integers(launches):
    """Of 63 bits; a range that has more has no kernel."""
    assert_equal(*both_ways(lambda: torch.randint(-(2**62), 2**62 - 1, (SAMPLES, 9)), launches))


def test_complex_numbers(launches):
    def draw():
        return torch.view_as_real(torch.rand(SAMPLES, 9, dtype=torch.complex64))

    assert_equal(*both_ways(draw, launches))


SHAPES = {  # the shape, and the layout of four samples
    "numbers": ((4,), DrawLayout("uniform_", 1, 0)),
    "several numbers per sample": ((12,), DrawLayout("uniform_", 1, 0, rows=3)),
    "interleaved numbers": ((12,), DrawLayout("uniform_", 1, 0, rows=3, interleaved=True)),
    "width 1": ((4, 1), DrawLayout("uniform_", 2, 0)),
    "stochastic depth": ((4, 1, 1, 1), DrawLayout("uniform_", 4, 0)),
    "samples second": ((3, 4, 7), DrawLayout("uniform_", 3, 1)),
    "samples last": ((3, 7, 4), DrawLayout("uniform_", 3, 2)),
    "rows": ((8, 3, 7), DrawLayout("uniform_", 3, 0, rows=2)),
    "interleaved rows": ((8, 3, 7), DrawLayout("uniform_", 3, 0, rows=2, interleaved=True)),
    "interleaved rows, second": ((3, 8, 7), DrawLayout("uniform_", 3, 1, rows=2, interleaved=True)),
    "interleaved rows, last": ((3, 5, 12), DrawLayout("uniform_", 3, 2, rows=3, interleaved=True)),
    "five dimensions": ((8, 2, 3, 2, 5), DrawLayout("uniform_", 5, 0, rows=2)),
    "wide": ((4, 3, 700), DrawLayout("uniform_", 3, 0)),
    "widest of the narrow": ((4, 128), DrawLayout("uniform_", 2, 0)),
    "narrowest of the wide": ((4, 129), DrawLayout("uniform_", 2, 0)),
    "many rows": ((4, 50, 2), DrawLayout("uniform_", 3, 0)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_layouts(name, launches):
    shape, layout = SHAPES[name]
    assert_equal(*both_ways(lambda: torch.empty(shape).uniform_(), launches, layout))


def test_alike_draws(launches):
    layout = DrawLayout("uniform_", 2, 0, rows=2)
    by_kernel, by_torch = both_ways(lambda: torch.rand(8, 7), launches, layout, alike=True)
    assert_equal(by_kernel, by_torch)
    assert torch.equal(by_kernel, by_kernel[:1].expand(8, 7))


STRIDED = {
    "transposed": lambda: torch.zeros(6, 5, SAMPLES).transpose(0, 2),
    "every other element": lambda: torch.zeros(SAMPLES, 5, 12)[..., ::2],
    "an offset": lambda: torch.zeros(SAMPLES, 5, 7)[:, 1:, 3:],
    "channels last": lambda: torch.zeros(SAMPLES, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("kind", ["uniform in a range", "bernoulli of elements"])
def test_strides(kind, name, launches):
    """One launch, too; and nothing is written beside the elements."""

    def draw():
        target = STRIDED[name]()
        EXACT[kind](target)
        return target if target._base is None else target._base

    assert_equal(*both_ways(draw, launches))


def test_expanded_probabilities(launches):
    for p in (torch.tensor(0.3), torch.rand(19), torch.rand(SAMPLES, 3, 1), torch.rand(3, 19, dtype=torch.float64)):
        assert_equal(*both_ways(lambda p=p: torch.empty(SAMPLES, 3, 19).bernoulli_(p), launches))


@pytest.mark.parametrize("draw", [torch.rand, torch.randn, lambda *shape: torch.empty(shape).bernoulli_(0.4)])
def test_padding_changes_nothing_before_it(draw):
    """Nor does the width of the kernel's tiles."""
    with fused_on_cpu():
        padded = []
        for length in (7, 150):
            with SampleDraws((0, 1), range(SAMPLES), DrawRecord(), "train"):
                padded.append((draw(SAMPLES, length), draw(SAMPLES, 2, length, 3)))
    for short, long in zip(*padded, strict=True):
        assert torch.equal(short, long[tuple(map(slice, short.shape))])


def test_nothing_is_launched_for_what_has_no_kernel(launches):
    """Empty tensors, and six dimensions."""
    assert_equal(*both_ways(lambda: torch.rand(SAMPLES, 0), launches, expected_launches=0))
    assert_equal(*both_ways(lambda: torch.rand(SAMPLES, 1, 2, 1, 2, 3), launches, expected_launches=0))


# --- dropout


INPUTS = {
    "contiguous": lambda: torch.randn(SAMPLES, 3, 19),
    "wide": lambda: torch.randn(SAMPLES, 300),
    "transposed": lambda: torch.randn(19, 3, SAMPLES).transpose(0, 2),
    "expanded": lambda: torch.randn(SAMPLES, 1, 19).expand(SAMPLES, 3, 19),
    "a slice": lambda: torch.randn(SAMPLES, 3, 38)[..., ::2],
    "not finite": lambda: torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1.0]).repeat(SAMPLES, 9),
}


@pytest.mark.parametrize("p", [0.3, 0.01])
@pytest.mark.parametrize("name", INPUTS)
def test_dropout_is_one_launch(name, p, launches):
    """Result and mask, also of infinities that are dropped."""
    inputs = INPUTS[name]()
    by_kernel, by_torch = both_ways(lambda: torch.native_dropout(inputs, p, True), launches)
    assert torch.equal(by_kernel[1], by_torch[1])
    assert torch.allclose(by_kernel[0], by_torch[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(by_kernel[0].signbit() & ~by_kernel[0].isnan(), by_torch[0].signbit() & ~by_torch[0].isnan())
    assert 0 < (~by_kernel[1]).sum() < inputs.numel()


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_in_each_precision(dtype, launches):
    inputs = torch.randn(SAMPLES, 3, 19, dtype=dtype)
    by_kernel, by_torch = both_ways(lambda: torch.native_dropout(inputs, 0.3, True), launches)
    assert_equal(by_kernel[0], by_torch[0])
    assert torch.equal(by_kernel[1], by_torch[1])


def test_dropout_that_no_sample_owns(launches):
    """One mask for all micro-batches, by torch's kernel: the same that `bernoulli_` draws."""
    layout = DrawLayout("bernoulli_.float", 2)
    inputs = torch.ones(5, 19)
    drawn = both_ways(lambda: torch.native_dropout(inputs, 0.3, True)[0], launches, layout, expected_launches=0)
    assert_equal(*drawn)


def test_dropout_without_a_kernel(launches):
    """Of complex numbers, where only the mask has one; and of nothing."""
    for inputs, masks in ((torch.ones(SAMPLES, 19, dtype=torch.complex64), 1), (torch.ones(SAMPLES, 0), 0)):
        drawn = both_ways(lambda x=inputs: torch.native_dropout(x, 0.3, True)[0], launches, expected_launches=masks)
        assert_equal(*drawn)


def test_the_gradient_of_dropout(launches):
    inputs = torch.randn(SAMPLES, 19)

    def draw():
        leaf = inputs.clone().requires_grad_()
        torch.native_dropout(leaf, 0.3, True)[0].sum().backward()
        return leaf.grad

    assert_equal(*both_ways(draw, launches))


def test_layers_draw_the_same(launches):
    """Attention and a recurrent network, as they are called in a model."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    x = torch.randn(SAMPLES, 6, 8)

    def draw():
        attended = attention(x, x, x)[0]
        return F.dropout(attended, 0.3) + torch.randn_like(x)

    layouts = {0: DrawLayout("bernoulli_.float", 3, 0, rows=2), 1: DrawLayout("bernoulli_.float", 3, 0)}
    drawn = []
    for on in (True, False):
        record = DrawRecord({"train": layouts | {2: DrawLayout("normal_", 3, 0)}})
        with fused_on_cpu(on), SampleDraws((0, 7), range(SAMPLES), record, "train"):
            drawn.append(draw())
        assert not record.depends
    assert torch.allclose(*drawn, atol=2e-6)


# --- large numbers


@triton.jit
def _store_words(key, first: tl.int64, words, WIDTH: tl.constexpr):
    element = first.to(tl.int64) + tl.arange(0, 8)
    word = kernels._random_part(tl.load(key), element, WIDTH)
    tl.store(words + tl.arange(0, 8), word.to(words.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("first", [0, 2**31 - 4, 2**32 - 4, 2**33, 2**40])
def test_words_far_in_a_stream(first, dtype):
    """Elements are numbered in 64 bits."""
    key = torch.tensor([[signed(0x9E3779B97F4A7C15 * 5)]])
    words = torch.empty(8, dtype=dtype)
    _store_words[(1,)](key, first, words, WIDTH=8 * dtype.itemsize)
    per_word = 8 // dtype.itemsize
    begin = first // per_word * per_word
    assert torch.equal(words, random_words(key, begin, first - begin + 8, dtype)[0, first - begin :])


@triton.jit
def _store_places(row: tl.int64, column: tl.int64, stride: tl.int64, places):
    rows = row.to(tl.int64) + tl.arange(0, 2)[:, None]
    columns = column.to(tl.int64) + tl.arange(0, 2)[None, :]
    coordinates = kernels._coordinates(rows, (1, 2**20, 1, 1))
    offset = kernels._offset(coordinates, columns, (stride, 0, 2**12, 0, 0, 1))
    tl.store(places + tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :], offset)


def test_places_are_computed_in_64_bits():
    """Of a tensor with 2**45 elements, which is not allocated."""
    places = torch.empty(2, 2, dtype=torch.int64)
    row, column, stride = 5 * 2**20 + 2**20 - 1, 2**33 + 3, 2**42
    _store_places[(1,)](row, column, stride, places)
    expected = [
        [5 * stride + (2**20 - 1) * 2**12 + c for c in (column, column + 1)],
        [6 * stride + c for c in (column, column + 1)],
    ]
    assert places.tolist() == expected


# --- the trial


def test_the_trial_passes_and_notices_other_numbers(monkeypatch, caplog):
    device = torch.device("cpu")
    fused._try_kernel(device)
    fused._is_usable.cache_clear()
    monkeypatch.setattr(fused.counter_based, "uniform", lambda *args: uniform(*args) + 1e-7)
    assert not fused._is_usable(device)
    assert "Triton computes other numbers" in caplog.text
    fused._is_usable.cache_clear()


def test_the_trial_succeeds_where_fp64_is_the_default():
    """As in the check of a loss."""
    torch.set_default_dtype(torch.float64)
    try:
        fused._try_kernel(torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
