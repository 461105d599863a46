"""Triton's kernels against torch's: draws by sample, and AdamW in low precision; seconds on the device, and on the
host, which launches them.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gpu_check import jobs
from trainapp.draws import fused
from trainapp.draws.random_operations import install
from trainapp.draws.record import DrawRecord
from trainapp.draws.sample_draws import SampleDraws
from trainapp.optim import fused_adamw
from trainapp.optim.low_precision import AdamW

SHAPES = {"cuda": (16, 1024, 1024), "cpu": (4, 16, 64)}
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.1),
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.1),
}
CALLS = 20
LEAST_GAIN = 5  # of one kernel over many of torch's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_time_of_a_draw(device, got, monkeypatch, kind, dtype):
    """one kernel: a fifth of the time of torch's kernels at most; torch's own draw for comparison"""
    install(device)
    x = torch.zeros(SHAPES[device], device=device, dtype=dtype)
    samples = range(len(x))
    own = seconds(device, lambda: KINDS[kind](x))
    with SampleDraws((0, 1), samples, DrawRecord(), "train"):
        by_sample = seconds(device, lambda: KINDS[kind](x))
    monkeypatch.setattr(fused, "DEVICE_TYPES", set())
    with SampleDraws((0, 1), samples, DrawRecord(), "train"):
        by_torchs_kernels = seconds(device, lambda: KINDS[kind](x))
    got(f"{by_sample * 1e6:.0f} us, {by_sample / own:.1f} times torch's own")
    got(f"{by_torchs_kernels / own:.0f} times without Triton")
    assert device == "cpu" or by_sample * LEAST_GAIN <= by_torchs_kernels


def test_the_time_of_a_launch(device, got, needs_cuda):
    """of a small dropout, where the host decides: at most 0.2 ms"""
    install(device)
    x = torch.zeros(16, 64, device=device)
    with SampleDraws((0, 1), range(16), DrawRecord(), "train"):
        taken = seconds(device, lambda: F.dropout(x, 0.1))
    got(f"{taken * 1e6:.0f} us")
    assert taken < 0.2e-3


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit", "4bit"])
def test_the_time_of_an_update(device, got, monkeypatch, state_dtype):
    """AdamW in low precision, of 100 parameters: one kernel each takes half of the time of torch's kernels at most"""
    shape = (512, 512) if device == "cuda" else (64, 64)
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for _ in range(100)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW(parameters, state_dtype=state_dtype)
    fused_seconds = seconds(device, optimizer.step, calls=2)
    monkeypatch.setattr(fused_adamw, "DEVICE_TYPES", set())
    torchs_seconds = seconds(device, optimizer.step, calls=2)
    got(f"{fused_seconds * 1e3:.2f} ms, without Triton {torchs_seconds / fused_seconds:.1f} times as long")
    assert device == "cpu" or fused_seconds * 2 <= torchs_seconds


def seconds(device: str, call: Callable[[], Any], calls: int = CALLS) -> float:
    """Of a call, among many: the median of five rounds, after one that compiles."""
    rounds = []
    for _ in range(6):
        jobs.synchronise(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        jobs.synchronise(device)
        rounds.append((time.perf_counter() - started) / calls)
    return statistics.median(rounds[1:])
