"""Draws in one launch of Triton's kernel: the same numbers, compiled once and as written; and what happens without."""

import os
import re
import subprocess
import sys
import timeit

import pytest
import torch
from helpers import ROOT

from trainapp.draws import counter_based, fused, random_operations
from trainapp.draws.counter_based import BLOCK
from trainapp.draws.filling import fill_by_sample
from trainapp.draws.layout import DrawLayout
from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws
from trainapp.torch_private import fake_tensor_mode

CPU = torch.device("cpu")


class RecordedLaunches:
    """In place of the kernel: the arguments of its launches."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        self.grid = grid
        return self

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))


@pytest.fixture
def kernel():
    """The kernel itself. Triton comes with torch for CUDA."""
    pytest.importorskip("triton", reason="needs triton")
    from trainapp.draws import kernels

    return kernels.draw


@pytest.fixture
def launches(kernel, monkeypatch):
    """What would be launched, for tensors of the CPU."""
    from trainapp.draws import kernels

    recorded = RecordedLaunches()
    monkeypatch.setattr(kernels, "draw", recorded)
    monkeypatch.setattr(fused, "DEVICE_TYPES", {"cpu", "meta"})
    monkeypatch.setattr(fused, "_is_usable", lambda device: True)
    return recorded


def drawing(samples=4):
    return SampleDraws((0, 1), range(samples), DrawRecord(), "train")


def dropout_of_cuda(inputs, p=0.3):
    """`torch.native_dropout`, whose kernel is replaced on CUDA alone."""
    call = random_operations.OperationCall(SampleDraws.active, "native_dropout", None, (inputs, p, True), {})
    return random_operations._dropout(call)


@pytest.mark.slow
def test_the_kernel_draws_what_torchs_kernels_draw():
    """In Triton's interpreter, which a process chooses when it imports the kernel."""
    pytest.importorskip("triton", reason="needs triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/draws/fused_in_interpreter.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


# --- compilation

KINDS = {
    "uniform": lambda x: x.uniform_(-0.3, 0.4),
    "bernoulli": lambda x: x.bernoulli_(0.01),
    "bernoulli of 16 bits": lambda x: x.bernoulli_(0.3),
    "bernoulli of elements": lambda x: x.bernoulli_(x),
    "dropout": dropout_of_cuda,
    "integers": lambda x: x.random_(-5, 1000),
    "normal": lambda x: x.normal_(),
    "exponential": lambda x: x.exponential_(),
}
USE_LIBRARY = {"normal", "exponential"}  # logarithm, cosine and sine of CUDA's, which are made of multiply-adds


def specialized(kernel, call, architecture):
    """How Triton would compile a launch: its backend, the arguments, and which of their values matter."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    args, kwargs = call
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    return target, backend, kwargs, binder(*args, **kwargs)


def assembly(kernel, call, architecture, **changes):
    """The kernel of a launch as PTX; compiled as Triton does, but for any architecture, and without a GPU."""
    import triton
    from triton.compiler import ASTSource

    target, backend, kwargs, (bound, specialization, _) = specialized(kernel, call, architecture)
    kwargs = kwargs | changes
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, None)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__).asm["ptx"]


def multiply_adds(ptx):
    return re.findall(r"\bfma\.\S+", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [75, 80, 90])
def test_kernels_compile_to_what_is_written(kernel, launches, architecture, monkeypatch, tmp_path):
    """For every kind. A product and a sum that are contracted would round once, a GPU's other square root worse."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kind, draw in KINDS.items():
        for dtype in (torch.float32, torch.bfloat16 if kind == "dropout" else torch.float64):
            launches.calls.clear()
            with drawing():
                draw(torch.zeros(4, 7, dtype=dtype))
            ptx = assembly(kernel, launches.calls[0], architecture)
            assert bool(multiply_adds(ptx)) == (kind in USE_LIBRARY), (kind, dtype)
            assert "sqrt.approx" not in ptx
            assert ("sqrt.rn" in ptx) == (kind == "normal")
            if dtype is torch.bfloat16 and architecture >= 80:
                assert "cvt.rn.bf16.f32" in ptx


@pytest.mark.slow
def test_contraction_would_be_noticed(kernel, launches, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with drawing():
        KINDS["uniform"](torch.zeros(4, 7))
    assert multiply_adds(assembly(kernel, launches.calls[0], 80, enable_fp_fusion=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_compiled_once_for_all_seeds_and_sizes(kernel, launches, kind):
    """For 200 draws: also sizes of 1, multiples of 16, any number of dimensions, strides and addresses."""
    generator = torch.Generator().manual_seed(0)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    targets = []
    for _ in range(200):
        shape = [integer(1, 34) for _ in range(integer(0, 4))]
        target = torch.zeros(4, *shape, integer(2, 300))
        targets.append(target[..., 1:] if integer(0, 2) else target)
    for step, target in enumerate(targets):
        with SampleDraws((0, step), range(step, step + 4), DrawRecord(), "train"):
            KINDS[kind](target)
    assert len(launches.calls) == 200
    assert len({str(specialized(kernel, call, 80)[3][1]) for call in launches.calls}) == 1


# --- the launch


def operations_of(draw):
    """The operations of ATen that a draw calls, without those that only make views."""
    draw()
    with torch.profiler.profile() as profile:
        draw()
    names = {event.key.removeprefix("aten::") for event in profile.key_averages() if event.key.startswith("aten::")}
    return names - {
        "movedim",
        "permute",
        "unflatten",
        "view",
        "as_strided",
        "transpose",
        "expand_as",
        "expand",
        "slice",
    }


def test_a_draw_allocates_its_result_alone(launches):
    """And launches nothing else: the keys of the samples are made once per micro-batch."""
    inputs = torch.zeros(4, 3, 19)
    p = torch.rand(19)
    with drawing():
        assert operations_of(lambda: dropout_of_cuda(inputs)) <= {"empty_like", "empty_strided", "empty"}
        for draw in (lambda: inputs.uniform_(), lambda: inputs.bernoulli_(0.3), lambda: inputs.bernoulli_(p)):
            launches.calls.clear()
            assert operations_of(draw) <= {"uniform_", "bernoulli_"}
            assert len(launches.calls) == 2


def test_the_host_takes_less_than_60_microseconds(launches):
    """For a draw, without the launch."""
    inputs = torch.zeros(16, 4, 19)
    with drawing(16):
        for draw in (lambda: dropout_of_cuda(inputs), lambda: inputs.normal_()):
            assert min(timeit.repeat(draw, number=50, repeat=20)) / 50 < 60e-6


def test_a_trace_launches_nothing(launches):
    """Fake tensors, and those on the meta device."""
    with fake_tensor_mode(), drawing():
        assert torch.rand(4, 3).shape == (4, 3)
        dropout_of_cuda(torch.ones(4, 3))
    with drawing():
        torch.empty(4, 3, device="meta").uniform_()
    assert not launches.calls
    with drawing():
        torch.rand(4, 3)
    assert launches.calls


# --- the samples' keys


@pytest.mark.parametrize("positions", [range(3, 7), range(0, 8, 2), [5, 0, 2**40, 1]])
@pytest.mark.parametrize("alike", [False, True])
def test_keys_follow_the_positions(positions, alike):
    """On the device and on the host, from ranges and lists."""
    draws = SampleDraws((0, 1), positions, DrawRecord(), "train", alike=alike)
    of_list = SampleDraws((0, 1), list(positions), DrawRecord(), "train", alike=alike)
    keys = draws.sample_keys(CPU, 4)
    assert keys.dtype is torch.int64
    assert keys.shape == (4, 1)
    assert torch.equal(keys, of_list.sample_keys(CPU, 4))
    assert (keys[:, 0] + 12345).tolist() == draws.keys_on_host(4, 12345)
    assert len(set(keys[:, 0].tolist())) == (1 if alike else 4)


def test_attention_is_looked_up_once():
    """Not in each call, which would take longer than to draw nothing."""
    record = DrawRecord()
    name = "_scaled_dot_product_flash_attention"
    random_operations._operator.cache_clear()
    sample_draws = SampleDraws((0, 1), range(4), record, "train")
    for dropout_p in (0.0, 0.0, 0.1):
        args = (None, None, None, dropout_p)
        call = random_operations.OperationCall(sample_draws, name, lambda *args: "attended", args, {})
        assert random_operations._note_fused(call) == "attended"
        assert bool(record.depends) == (dropout_p > 0)
    assert random_operations._operator.cache_info().misses == 1


# --- without Triton


@pytest.fixture
def asks_again():
    fused._is_usable.cache_clear()
    fused._kernels.cache_clear()
    yield
    fused._is_usable.cache_clear()
    fused._kernels.cache_clear()


def test_a_kernel_that_cannot_run_is_said_once(asks_again, monkeypatch, caplog):
    """Without Triton here; the numbers are the same, by torch's kernels."""
    with drawing():
        expected = torch.rand(4, 3)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "trainapp.draws.kernels", raising=False)
    monkeypatch.delattr("trainapp.draws.kernels", raising=False)
    monkeypatch.setattr(fused, "DEVICE_TYPES", {"cpu"})
    with drawing():
        assert torch.equal(torch.rand(4, 3), expected)
        torch.rand(4, 3)
    (message,) = caplog.messages
    assert "by many kernels of torch" in message
    assert "triton" in message


def test_running_out_of_memory_in_the_trial_is_no_answer(asks_again, monkeypatch):
    """It is recovered from, and the trial repeated."""

    def fails(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(fused, "_try_kernel", fails)
        with pytest.raises(torch.OutOfMemoryError):
            fused._is_usable(CPU)
    monkeypatch.setattr(fused, "_try_kernel", lambda device: None)
    assert fused._is_usable(CPU)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16, 2**18), (2**22, 1), (2, 2**22), (4, 2**10, 2**10), (3, 2**20 - 1, 1)])
def test_torchs_kernels_on_cuda_take_64_mib_at_most(monkeypatch, shape, dtype):
    """In blocks of CUDA's size, here on the CPU."""
    monkeypatch.setitem(BLOCK, "cpu", BLOCK["cuda"])
    counter_based._word_steps.cache_clear()
    target = torch.empty(shape, dtype=dtype)
    keys = torch.arange(shape[0])[:, None]
    layout = DrawLayout("normal_", len(shape), axis=0)
    fill_by_sample(counter_based.normal, target[:1], layout, keys[:1], ())  # makes the table of steps
    with torch.profiler.profile(profile_memory=True) as profile:
        fill_by_sample(counter_based.normal, target, layout, keys, ())
    counter_based._word_steps.cache_clear()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak <= 64 * 2**20
