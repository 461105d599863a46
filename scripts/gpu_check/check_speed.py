"""Steps per second relative to a loop written by hand (benchmarks/overhead.py), and what makes a step wait."""

import collections
import dataclasses
import warnings
from pathlib import Path

import overhead
import pytest
import runs
import torch
from _common import quartiles

from gpu_check import jobs
from trainapp.training import loop
from trainapp.training.session import Session

CPU_SETTINGS = {
    "small": ("model.width=16",),
    "gpt": ("model.width=16", "model.depth=1", "model.context_length=16"),
    "resnet": ("model.width=4", "data.image_shape=[3,8,8]"),
}
STEPS = 5
# (model, settings, most waits per step). fp16 reads once whether the gradients overflowed, nonfinite=skip once whether
# count, loss and gradients are finite.
WAITING = (
    ("mlp", (), 0),
    ("gpt", (), 0),
    ("gpt", ("precision=bf16",), 0),
    ("resnet", ("model.norm=batch",), 0),
    ("mlp", ("train.ema=0.9",), 0),
    ("gpt", ("precision=fp16", "precision.initial_scale=256"), 1),
    ("mlp", ("train.nonfinite=skip",), 1),
)


@pytest.mark.parametrize("name", ["small", "wide", "gpt", "resnet"])
def test_the_ratio_to_a_loop_written_by_hand(tmp_path, device, got, name):
    """the target of benchmarks/overhead.py; on the CPU only the same losses: one short round says nothing of speed"""
    case = dataclasses.replace(overhead.CASES[name], device=device, steps=50, rounds=6)
    if device == "cpu":
        if name not in CPU_SETTINGS:
            pytest.skip("needs CUDA")
        settings, tokens = (*case.settings, *CPU_SETTINGS[name]), 16 if name == "gpt" else 1
        case = dataclasses.replace(case, settings=settings, counted=tokens, steps=10, rounds=1)
    found = overhead.measure(case, tmp_path, only_trainapp=True)["trainapp"]  # raises where losses differ
    low, ratio, high = quartiles(found["ratios"])
    got(f"{1 / quartiles(found['seconds'])[1]:.0f} steps/s, {ratio:.3f} ({low:.3f} to {high:.3f})")
    assert device == "cpu" or ratio >= case.target


@pytest.mark.parametrize(("model", "settings", "most"), WAITING, ids=[" ".join([m, *s]) for m, s, _ in WAITING])
def test_how_often_a_step_of_a_proven_size_waits(tmp_path, needs_cuda, got, model, settings, most):
    """never; once with fp16 and nonfinite=skip: as torch's debug mode counts it, which sees no collectives"""
    plain = jobs.overrides("cuda", model, "checkpointing=off", "train.max_steps=1000", "every.log=null")
    session = runs.prepare(tmp_path, *plain, *settings)
    waits = waits_of(session)
    session.close()
    per_step = sum(waits.values()) / STEPS
    got("; ".join([f"{per_step:g}", *(f"{count} x {place}" for place, count in waits.most_common(3))]))
    assert per_step <= most


def waits_of(session: Session) -> collections.Counter[str]:
    """The places in this program, or in torch, at which STEPS steps waited."""

    def steps(count: int) -> None:
        for _ in range(count):
            loop.train_step(session)
            loop.update_weight_average(session)

    steps(10)
    assert not session.sizes.train.is_unvalidated
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(STEPS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(entry.filename).name}:{entry.lineno}" for entry in caught if "synchroniz" in str(entry.message)]
    return collections.Counter(places)
