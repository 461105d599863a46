"""16-bit matmuls, convolutions and attention on a CPU without instructions for them."""

import os
import subprocess
import sys

import helpers
import pytest
import runs
import torch

from trainapp.optim import emulated_kernels

CPU = torch.device("cpu")

# A CPU without the instructions, wherever the test runs; in a process of its own, since replaced operators stay so.
LACKING = """
import torch
import torch.nn.functional as F
from torch import nn
from trainapp.optim import emulated_kernels
from trainapp.optim.emulated_kernels import REDUCED
emulated_kernels.is_native = lambda dtype: dtype not in REDUCED

def install():
    return all([emulated_kernels.install_for(torch.device("cpu"), dtype) for dtype in REDUCED])
"""


def in_a_process(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LACKING + code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_are_those_of_torchs_own_kernels():
    """Forward and gradients, dtypes and strides; both are within the rounding of 16 bits of the result in fp32."""
    in_a_process("""
torch.manual_seed(0)
r = torch.randn

def channels_last(x, weight):
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), weight)

def gru(x, *weights):
    return torch.gru(x, torch.zeros(1, 3, 8, dtype=x.dtype), weights, True, 1, 0.0, True, False, True)[0]

CASES = {
    "mm": (torch.mm, r(24, 40), r(40, 56)),
    "of a transpose": (lambda a, b: a @ b.t(), r(24, 40), r(56, 40)),
    "linear": (F.linear, r(2, 12, 40), r(56, 40), r(56)),
    "bmm": (torch.bmm, r(3, 8, 16), r(3, 16, 8)),
    "baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2), r(3, 8, 8), r(3, 8, 16), r(3, 16, 8)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), r(3, 8, 16), r(3, 8, 16)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), r(4, 8, 9, 9), r(16, 8, 3, 3), r(16)),
    "channels last": (channels_last, r(4, 8, 9, 9), r(16, 8, 3, 3)),
    "by groups": (lambda x, w: F.conv2d(x, w, groups=8), r(4, 8, 9, 9), r(8, 1, 3, 3)),
    "of sequences": (F.conv1d, r(4, 8, 20), r(16, 8, 3)),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), r(4, 8, 5, 5), r(8, 16, 4, 4)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *r(3, 2, 2, 33, 16)),
    "GRU": (gru, r(3, 5, 8), r(24, 8) / 3, r(24, 8) / 3, r(24), r(24)),
}

def results(dtype):
    by_case = {}
    for name, (function, *inputs) in CASES.items():
        leaves = [x.to(dtype).float().to(dtype).requires_grad_() for x in inputs]
        output = function(*leaves)
        gradients = torch.autograd.grad(output, leaves, torch.full_like(output, 0.5))
        by_case[name] = [output.detach(), *gradients]
    return by_case

own = {dtype: results(dtype) for dtype in REDUCED}
assert install()
for dtype in REDUCED:
    for name, emulated in results(dtype).items():
        for one, expected in zip(emulated, own[dtype][name], strict=True):
            assert one.dtype is dtype and one.shape == expected.shape, name
            error = (one.float() - expected.float()).norm() / expected.float().norm()
            assert error < 0.01, (name, dtype, error)
""")


def test_what_writes_in_place_or_into_another_tensor():
    in_a_process("""
a, b, c = torch.randn(8, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(8, 8).bfloat16()
assert install()
product = a @ b
out = torch.empty(0, dtype=torch.bfloat16)
address = c.data_ptr()
assert torch.mm(a, b, out=out) is out and torch.equal(out, product)
assert torch.equal(torch.addmm(c, a, b, out=torch.empty_like(c)), torch.addmm(c, a, b))
expected = torch.addmm(c, a, b, beta=0.5)
assert c.addmm_(a, b, beta=0.5) is c and c.data_ptr() == address and torch.equal(c, expected)
stack, stacks = c[None].clone(), (a[None], b[None])
expected = torch.baddbmm(stack, *stacks)
assert torch.equal(stack.baddbmm_(*stacks), expected)
""")


def test_other_dtypes_are_computed_as_before_and_mixed_ones_refused():
    in_a_process("""
a, b, images, weight = torch.randn(8, 16), torch.randn(16, 8), torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3)
before = a @ b, F.conv2d(images, weight), (a.double() @ b.double())
assert install()
after = a @ b, F.conv2d(images, weight), (a.double() @ b.double())
assert all(torch.equal(one, other) for one, other in zip(before, after))
for function, one, other in ((torch.mm, a, b), (F.conv2d, images, weight)):
    for first, second in ((one.bfloat16(), other), (one, other.bfloat16()), (one.half(), other.bfloat16())):
        try:
            function(first, second)
        except RuntimeError:
            continue
        raise AssertionError(f"{function} of {first.dtype} and {second.dtype}")
""")


def test_autograd_saves_16_bits_and_dispatch_modes_see_one_operation():
    """So a plan, which traces the operators' fake kernels, and the counter of memory agree with a run."""
    in_a_process("""
from torch.utils._python_dispatch import TorchDispatchMode
assert install()
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 5, bias=False))
saved, operations = set(), []

class Recorded(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operations.append(func._schema.name)
        return func(*args, **(kwargs or {}))

def keep(tensor):
    saved.add((tensor.dtype, tuple(tensor.shape)))
    return tensor

images = torch.randn(2, 3, 8, 8)
with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
    with Recorded():
        model(images)
assert (torch.bfloat16, (2, 3, 8, 8)) in saved and (torch.bfloat16, (2, 288)) in saved, saved
assert not [shape for dtype, shape in saved if dtype is torch.float32], saved
assert [name for name in operations if "copy" not in name and "detach" not in name and "view" not in name] == [
    "aten::convolution", "aten::t", "aten::mm"
], operations
""")


def test_an_overflow_of_fp16_is_infinite():
    """As on a device that computes in it: the loss scale depends on it."""
    in_a_process("""
assert install()
large = torch.full((4, 4), 200.0).half()
assert torch.isinf(large @ large).all()
""")


def test_an_lstm_trains_under_autocast():
    """torch's own kernel for it ends in an error on such a CPU."""
    in_a_process("""
assert install()
torch.manual_seed(0)
model, sequences = nn.LSTM(8, 16, num_layers=2, batch_first=True), torch.randn(3, 7, 8)

def gradients(dtype):
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        output, (last, cell) = model(sequences)
    assert dtype is None or {value.dtype for value in (output, last, cell)} == {dtype}
    return torch.cat([g.flatten() for g in torch.autograd.grad(output.float().square().sum(), model.parameters())])

exact = gradients(None)
for dtype, most in ((torch.bfloat16, 0.02), (torch.float16, 0.003)):
    error = (gradients(dtype) - exact).norm() / exact.norm()
    assert 0 < error < most, (dtype, error)
""")


@pytest.mark.slow
def test_compiled_graphs_reach_them():
    """Inductor calls the overloads with `out=`."""
    in_a_process("""
calls = []
original = emulated_kernels._widened
emulated_kernels._widened = lambda value, dtype: calls.append(dtype) or original(value, dtype)
assert install()
weight = torch.randn(16, 16).bfloat16()
compiled = torch.compile(lambda x: torch.relu(x @ weight) @ weight, dynamic=False)
inputs = torch.randn(4, 16).bfloat16()
result = compiled(inputs)
assert calls
assert torch.allclose(result.float(), (torch.relu(inputs @ weight) @ weight).float(), rtol=0.02, atol=0.2)
""")


@pytest.mark.parametrize("kind", ["bf16", "fp16", "no oneDNN"])
def test_nothing_is_replaced_where_the_cpu_has_the_instructions(monkeypatch, kind):
    def replace():
        raise AssertionError

    class Library:
        _is_mkldnn_bf16_supported = staticmethod(lambda: kind == "bf16")
        _is_mkldnn_fp16_supported = staticmethod(lambda: kind == "fp16")

    monkeypatch.setattr(torch.ops, "mkldnn", object() if kind == "no oneDNN" else Library)
    monkeypatch.setattr(emulated_kernels, "_replace_kernels", replace)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if kind == name:
            assert not emulated_kernels.install_for(CPU, dtype)
        else:
            with pytest.raises(AssertionError):
                emulated_kernels.install_for(CPU, dtype)
    for other in (torch.float32, torch.float64):
        assert not emulated_kernels.install_for(CPU, other)
    for device in ("cuda", "mps", "meta"):
        assert not emulated_kernels.install_for(torch.device(device), torch.bfloat16)


@pytest.mark.skipif(sys.platform != "linux" or "x86" not in os.uname().machine, reason="sets switches of x86 on Linux")
def test_such_a_cpu_can_be_imitated():
    code = "import torch; from trainapp.optim.emulated_kernels import is_native; print(is_native(torch.bfloat16))"
    variables = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("overrides", "dtypes"),
    [
        (("precision=fp32",), []),
        (("precision=bf16",), [torch.bfloat16]),
        (("precision=bf16_pure", "optimizer=adamw_bf16"), [torch.bfloat16]),
        (("precision=fp16",), [torch.float16]),
        (("optimizer=muon",), [torch.bfloat16]),
        (("optimizer._target_=torch.optim.Muon", "model.freeze=['*bias']"), [torch.bfloat16]),
    ],
)
def test_what_computes_in_16_bits_asks_for_it(tmp_path, monkeypatch, overrides, dtypes):
    replaced = []
    monkeypatch.setattr(emulated_kernels, "is_native", lambda dtype: replaced.append(dtype) or True)
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], *overrides, "train.max_steps=1")
    run.tracker.close()
    assert sorted({str(dtype) for dtype in replaced if dtype is not torch.float32}) == sorted(map(str, dtypes))


@pytest.mark.slow
def test_a_run_says_so_once(tmp_path):
    code = """
from trainapp.__main__ import main
import sys
sys.argv = ["trainapp", *sys.argv[1:]]
main()
"""
    overrides = ("model=mlp", "train.max_steps=1", "train.device=cpu")
    said = {}
    for mode in ("fp32", "bf16"):
        done = subprocess.run(
            [sys.executable, "-c", LACKING + code, *overrides, f"precision={mode}", f"hydra.run.dir={tmp_path / mode}"],
            env=helpers.environment(),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        said[mode] = (done.stdout + done.stderr).count("this CPU has no bfloat16 instructions")
    assert said == {"fp32": 0, "bf16": 1}
