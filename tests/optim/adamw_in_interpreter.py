"""Updates by the fused kernel are those by torch's kernels, apart from the rounding by chance. Run by
test_fused_adamw.py in a process of its own, where TRITON_INTERPRET makes Triton's kernels run on CPU tensors.
"""

import pytest
import torch
from torch import nn

from trainapp.optim import fused_adamw, low_precision
from trainapp.optim.low_precision import AdamW
from trainapp.optim.quantizer import BLOCKS, Quantizer

CPU = torch.device("cpu")
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(fused_adamw, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(low_precision, "SMALLEST", 1)
    assert fused_adamw._is_usable(CPU)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(37, 29), (5,), (4, 256)]]


def trained(monkeypatch, is_fused, count=4, dtype=torch.float32, **options):
    """Parameters after some steps, and their optimizer."""
    monkeypatch.setattr(fused_adamw, "DEVICE_TYPES", {"cpu"} if is_fused else set())
    own = parameters(dtype)
    optimizer = AdamW(own, **{**OPTIONS, **options})
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()
    return own, optimizer


def launched(monkeypatch):
    calls = []
    update = fused_adamw.update
    monkeypatch.setattr(fused_adamw, "update", lambda *args, **kwargs: (calls.append(1), update(*args, **kwargs)))
    return calls


@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.3, 0.95)])  # two ways in which `lerp` computes
def test_with_fp32_moments_it_is_the_same(monkeypatch, betas):
    calls = launched(monkeypatch)
    own, optimizer = trained(monkeypatch, True, state_dtype="fp32", betas=betas)
    assert len(calls) == 4 * 3
    others, other_optimizer = trained(monkeypatch, False, state_dtype="fp32", betas=betas)
    for parameter, other in zip(own, others, strict=True):
        torch.testing.assert_close(parameter, other, rtol=2e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[parameter][name]
            torch.testing.assert_close(value, other_optimizer.state[other][name], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_moments_and_parameters_are_rounded_to_a_neighbour(monkeypatch, dtype):
    own, optimizer = trained(monkeypatch, True, count=1, state_dtype="bf16", dtype=dtype)
    exact, exact_optimizer = trained(monkeypatch, False, count=1, state_dtype="fp32", dtype=torch.float32)
    for parameter, other in zip(own, exact, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[parameter][name]
            assert value.dtype is torch.bfloat16
            of_other = exact_optimizer.state[other][name]
            if dtype is torch.float32:  # gradients of the same bits
                torch.testing.assert_close(value.float(), of_other, rtol=2**-7, atol=0)
                assert (value.float() != of_other.bfloat16().float()).any()  # not to nearest
        torch.testing.assert_close(parameter.float(), other, rtol=2**-6, atol=2e-2)


def test_rounding_is_right_on_average(monkeypatch):
    """Each step moves the parameter by less than half of bf16's last bit."""
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=1e-3, weight_decay=0.0, state_dtype="bf16")
    for _ in range(10):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.double().mean().item() == pytest.approx(1 - 10 * 1e-3, abs=2e-4)


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_are_those_of_neighbouring_levels(monkeypatch, kind):
    """From moments of the same codes, both choose the level below or above what is exact, at the same scale."""
    states = []
    for is_fused in (True, False):
        own, optimizer = trained(monkeypatch, is_fused, count=1, state_dtype=kind)
        states.append([optimizer.state[parameter] for parameter in own])
    exact, exact_optimizer = trained(monkeypatch, False, count=1, state_dtype="fp32")
    for fused_state, state, parameter in zip(*states, exact, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            of_roots = name == "exp_avg_sq"
            quantizer = Quantizer(kind, of_roots, CPU)
            torch.testing.assert_close(fused_state[f"{name}_scale"], state[f"{name}_scale"], rtol=2e-6, atol=0)
            whole = slice(0, parameter.numel())
            value = quantizer.read(fused_state[name], fused_state[f"{name}_scale"], whole)
            expected = exact_optimizer.state[parameter][name].flatten()
            scale = state[f"{name}_scale"].repeat_interleave(BLOCKS[kind])[: len(value)]
            units = (value.sqrt() if of_roots else value) / scale
            wanted = (expected.sqrt() if of_roots else expected) / scale
            levels = quantizer.levels
            below = torch.bucketize(wanted, levels[1:-1], right=True)
            is_near = (units - levels[below]).abs().minimum((units - levels[below + 1]).abs()) < 1e-5
            assert is_near.float().mean() > 0.999  # a level on the edge may round to another one
            # What fills the last block is zero.
            assert fused_state[name].count_nonzero() <= whole.stop


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_are_right_on_average(monkeypatch, kind):
    """Second moments that change by less than a level in each step."""
    means = []
    for is_fused in (True, False):
        monkeypatch.setattr(fused_adamw, "DEVICE_TYPES", {"cpu"} if is_fused else set())
        parameter = nn.Parameter(torch.zeros(4096))
        optimizer = AdamW([parameter], lr=0.0, betas=(0.9, 0.99), state_dtype=kind)
        for _ in range(30):
            parameter.grad = torch.linspace(0.5, 1, 4096)
            optimizer.step()
        state = optimizer.state[parameter]
        quantizer = Quantizer(kind, True, CPU)
        means.append(quantizer.read(state["exp_avg_sq"], state["exp_avg_sq_scale"], slice(0, 4096)).mean().item())
    assert means[0] == pytest.approx(means[1], rel=0.01)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", *BLOCKS])
def test_nan_stays_nan(monkeypatch, state_dtype):
    parameter = nn.Parameter(torch.zeros(512))
    optimizer = AdamW([parameter], state_dtype=state_dtype)
    parameter.grad = torch.zeros(512)
    parameter.grad[3] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # CUDA's NaN
    optimizer.step()
    assert parameter[3].isnan()
    parameter.grad = torch.zeros(512)
    optimizer.step()
    assert parameter[3].isnan()


def test_other_strides_take_torchs_kernels(monkeypatch):
    calls = launched(monkeypatch)
    parameter = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = AdamW([parameter], state_dtype="bf16")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not calls
    assert (parameter != 1).all()
