"""Random numbers by sample on CUDA: the same operations under its key, each in one kernel; and what attention draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainapp.draws import counter_based, fused
from trainapp.draws.layout import DrawLayout
from trainapp.draws.random_operations import install
from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws
from trainapp.torch_private import draw_as_uncompiled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "in bf16": lambda x: F.dropout(x.bfloat16(), 0.3),
    "randn": lambda x: torch.randn(len(x), 3, device="cuda"),
    "longer than a block": lambda x: torch.randn(len(x), 2**20 + 9, device="cuda"),
    "randint": lambda x: torch.randint(0, 1000, (len(x),), device="cuda"),
    "poisson": lambda x: torch.poisson(x * 9),
    "multinomial": lambda x: torch.multinomial(x[:, 0], 3),
    "on the CPU": lambda x: torch.rand(len(x), 3),
}


def drawn(kind, cut, draw_record):
    inputs, found = torch.ones(12, 6, 8, device="cuda"), []
    for positions in torch.arange(12).split(cut):
        with SampleDraws((0, 1), positions.tolist(), draw_record, "train"):
            found.append(kind(inputs[positions.cuda()]).float())
    return torch.cat(found)


@pytest.mark.parametrize("name", KINDS)
def test_a_draw_is_the_samples_own(name):
    """Torch's own, in another micro-batch, is another one."""
    install("cpu")
    install("cuda")
    whole = drawn(KINDS[name], 12, DrawRecord())
    assert all(torch.equal(drawn(KINDS[name], size, DrawRecord()), whole) for size in (5, 1))
    torch.manual_seed(0)
    inputs = torch.ones(12, 6, 8, device="cuda")
    torchs = torch.cat([KINDS[name](part).float() for part in inputs.split(5)])
    torch.manual_seed(0)
    assert not torch.equal(KINDS[name](inputs).float(), torchs)


def test_a_recomputation_in_autograds_thread():
    """Gradients of a checkpointed block are those of the plain one; also of a backward that draws."""
    install("cuda")
    layer, gradients = nn.Linear(8, 8).cuda(), []
    for checkpointed in (False, True):
        layer.zero_grad()
        with SampleDraws((0, 1), range(12), DrawRecord(), "train"):
            block = lambda x: F.dropout(layer(x), 0.3)  # noqa: E731
            x = torch.ones(12, 8, device="cuda", requires_grad=True)
            y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            y.square().sum().backward()
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)


def test_the_dropout_of_fused_attention_is_noted():
    install("cuda")
    heads = torch.randn(4, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    for backend, is_noted in ((SDPBackend.FLASH_ATTENTION, True), (SDPBackend.MATH, False)):
        draw_record = DrawRecord()
        with sdpa_kernel(backend), SampleDraws((0, 1), range(4), draw_record, "train"):
            F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        assert bool(draw_record.depends) == is_noted


# --- one kernel per draw

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FILLED = {
    "uniform": lambda x: x.uniform_(-0.3, 0.4),
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "rare bernoulli": lambda x: x.bernoulli_(0.01),
    "bernoulli of elements": lambda x: x.bernoulli_(torch.linspace(0.1, 0.9, x.shape[-1], device="cuda")),
    "dropout": lambda x: torch.native_dropout(x.fill_(1.5), 0.3, True)[0],
    "integers": lambda x: x.random_(-5, 1000),
    "normal": lambda x: x.normal_(1.5, 3.0),
    "exponential": lambda x: x.exponential_(3.0),
}
ROUNDED = {"normal", "exponential"}
TENSORS = {
    "narrow": lambda dtype: torch.zeros(8, 3, 19, device="cuda", dtype=dtype),
    "wide": lambda dtype: torch.zeros(8, 5, 1000, device="cuda", dtype=dtype),
    "width 1": lambda dtype: torch.zeros(8, 1, device="cuda", dtype=dtype),
    "transposed": lambda dtype: torch.zeros(300, 5, 8, device="cuda", dtype=dtype).transpose(0, 2),
    "channels last": lambda dtype: torch.zeros(8, 3, 4, 5, device="cuda", dtype=dtype).to(
        memory_format=torch.channels_last
    ),
}


def filled(kind, tensor):
    with SampleDraws((0, 1), range(8), DrawRecord(), "train"):
        return FILLED[kind](tensor)


def kernels_of(function):
    """The names of the kernels that a call launches."""
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    is_cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == is_cuda and "Mem" not in event.name]


@pytest.fixture
def without_triton(monkeypatch):
    """A function that makes all later draws those of torch's kernels."""
    return lambda: monkeypatch.setattr(fused, "DEVICE_TYPES", set())


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("kind", FILLED)
def test_a_kernel_draws_what_torchs_kernels_draw(kind, name, without_triton):
    """Bit for bit; up to the last bits of logarithm, cosine and sine."""
    install("cuda")
    by_kernel = [filled(kind, TENSORS[name](dtype)) for dtype in FLOATS]
    assert fused._is_usable(by_kernel[0].device)
    without_triton()
    for drawn in by_kernel:
        by_torch = filled(kind, TENSORS[name](drawn.dtype))
        assert drawn.stride() == by_torch.stride()
        if kind in ROUNDED:
            largest = by_torch.double().abs().max()
            difference = (drawn.double() - by_torch.double()).abs().max()
            assert difference <= 8 * torch.finfo(drawn.dtype).eps * largest
        else:
            assert torch.equal(drawn, by_torch), drawn.dtype


@pytest.mark.parametrize("kind", FILLED)
def test_a_draw_is_one_kernel(kind):
    """Dropout's, too, which writes the result and the mask; beside what fills its input here."""
    install("cuda")
    x = torch.zeros(16, 64, 1024, device="cuda")
    with SampleDraws((0, 1), range(16), DrawRecord(), "train"):
        names = kernels_of(lambda: FILLED[kind](x))
    others = {"dropout": 1, "bernoulli of elements": 1}.get(kind, 0)
    assert len(names) - others == 1, names


def test_draws_wait_for_nothing():
    """Neither do the keys of the samples, from a range or a list."""
    install("cuda")
    x = torch.zeros(4, 1000, device="cuda")
    filled("normal", torch.zeros(8, 3, device="cuda"))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for positions in (range(4), [3, 1, 2, 0]):
            with SampleDraws((0, 1), positions, DrawRecord(), "train"):
                x.normal_()
                torch.poisson(x.abs())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_longer_than_2_to_the_31():
    """Their last elements are those of the stream."""
    width = 2**31 + 64
    if torch.cuda.mem_get_info()[0] < 3 * width:
        pytest.skip("needs 6 GiB")
    install("cuda")
    keys = torch.tensor([[5], [-7]], device="cuda")
    target = torch.zeros(2, width, dtype=torch.bool, device="cuda")
    draw = fused.fused_draw(counter_based.bernoulli, target, (0.3,))
    fused.fill(draw, target, DrawLayout("bernoulli_.float", 2, axis=0), keys, seed=11)
    expected = counter_based.bernoulli(keys + 11, 2**31, 64, torch.bool, 0.3)
    assert torch.equal(target[:, -64:], expected)


def test_a_compiled_forward_draws_the_same():
    """With inductor's own generators off, as `train.compile` sets it for draws by sample."""
    install("cuda")
    x = torch.ones(8, 64, device="cuda")

    def forward(x):
        return F.dropout(x * 2, 0.3) + torch.rand_like(x)

    draw_as_uncompiled(True)
    drawn = []
    for function in (forward, torch.compile(forward)):
        with SampleDraws((0, 1), range(8), DrawRecord(), "train"):
            drawn.append(function(x))
    assert torch.equal(*drawn)
