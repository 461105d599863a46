"""Draws by sample against torch's own: seconds on the device, and on the host, which launches them."""

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


def seconds(device: str, draw: Callable[[], Any]) -> float:
    """Of a call, among many: the median of five rounds, after one that compiles."""
    rounds = []
    for _ in range(6):
        jobs.synchronise(device)
        started = time.perf_counter()
        for _ in range(CALLS):
            draw()
        jobs.synchronise(device)
        rounds.append((time.perf_counter() - started) / CALLS)
    return statistics.median(rounds[1:])
