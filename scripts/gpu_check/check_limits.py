"""Runs under limits, two jobs in one process, as in a sweep, and what a new size costs."""

import math
import time

import helpers
import pytest
import runs
from gpu import on_gpu

from gpu_check import jobs
from trainapp.errors import UserError
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training import loop

SHARES = {"cuda": (0.9, 0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25), "cpu": (0.6, 0.3)}  # of what a step needs
CLOSE = {"cuda": 0.05, "cpu": 0.5}  # where the bisection ends
SIZES = (1.0, 0.5, 0.25, 0.375, 0.3125, 1.0)  # of the global batch; the last repeats the first
AFTER = 7  # steps after the first: two more prove the size, one times the algorithms, the others are usual


def test_resnet_at_limits(tmp_path, device, got):
    """all steps and samples, finite losses, at most 20 MiB above the limit reserved; at least one error per run"""
    settings = jobs.overrides(device, "resnet", "model.norm=batch", "train.max_steps=6", "checkpointing=off")
    free = jobs.unlimited(tmp_path / "free", *settings)
    restarts = 0
    for share in SHARES[device]:
        limit = on_gpu.limit_between(free, share)
        result = on_gpu.launched(tmp_path / str(share), *settings, f"memory.limit={limit}")
        got(
            f"{jobs.text(limit)} of {jobs.text(free.peak_memory_bytes)}: micro-batch {result.micro_size}, "
            f"{result.oom_restarts} errors, {jobs.text(result.peak_reserved_bytes)} reserved"
        )
        assert (result.steps, result.samples) == (6, free.samples)
        assert all(math.isfinite(line["loss"]) for line in helpers.metrics(tmp_path / str(share)))
        assert result.peak_reserved_bytes <= limit + 20 * on_gpu.MIB
        restarts += result.oom_restarts
    assert restarts >= len(SHARES[device])


@pytest.fixture
def gpt(tmp_path, device):
    """Settings, and the result of a run without a limit."""
    settings = jobs.overrides(device, "gpt", "train.max_steps=4", "checkpointing=off")
    return settings, jobs.unlimited(tmp_path / "free", *settings)


def test_the_smallest_limit(tmp_path, device, got, gpt):
    """a limit, found by bisection, and one message below it; below what stays between steps it names memory.limit"""
    settings, free = gpt
    low, high, message = 0.0, 1.0, "every limit was enough"
    while high - low > CLOSE[device]:
        share = (low + high) / 2
        try:
            on_gpu.launched(tmp_path / f"{share}", *settings, f"memory.limit={on_gpu.limit_between(free, share)}")
            high = share
        except UserError as error:  # the program's own message that nothing smaller can fit
            low, message = share, str(error).splitlines()[0][:120]
    limit = jobs.text(on_gpu.limit_between(free, high))
    got(f"{limit}: {100 * high:.0f}% of what a step needs, beside {jobs.text(free.static)} that stay")
    got(f"below: {message}")
    with pytest.raises(UserError, match=r"memory\.limit"):
        on_gpu.launched(tmp_path / "too_small", *settings, f"memory.limit={free.static // 2}")


def test_jobs_in_one_process(tmp_path, device, got, gpt):
    """no error without a limit, after a job with one; errors again with one; memory grows by 1 MiB at most"""
    settings, free = gpt
    limit = f"memory.limit={on_gpu.limit_between(free, 0.5)}"
    on_gpu.launched(tmp_path / "first", *settings, limit)
    before = jobs.live_bytes(device)
    second = on_gpu.launched(tmp_path / "second", *settings)
    third = on_gpu.launched(tmp_path / "third", *settings, limit)
    growth = jobs.live_bytes(device) - before
    got(f"{second.oom_restarts} errors, then {third.oom_restarts}; memory grew by {jobs.text(growth)}")
    assert (second.steps, second.oom_restarts, third.steps) == (4, 0, 4)
    assert third.oom_restarts > 0
    assert growth <= on_gpu.MIB


def test_steps_at_new_sizes(tmp_path, device, got):
    """nothing: seconds of the first step (kernels are loaded), the slowest later (algorithms are timed), others"""
    settings = jobs.overrides(device, "resnet", "train.max_steps=1000", "checkpointing=off", "every.log=null")
    session = runs.prepare(tmp_path, *settings)
    for share in SIZES:
        size = int(share * session.config.batch.global_size)
        session.sizes.train = session.sizes.by_update[""] = MicroBatchSizes(size, grow=False)
        seconds = []
        for _ in range(1 + AFTER):
            started = time.monotonic()
            loop.train_step(session)
            jobs.synchronise(device)
            seconds.append(time.monotonic() - started)
        first, *later = seconds
        got(f"{size}: first {first:.3f}, slowest later {max(later):.3f}, then {sorted(later)[AFTER // 2]:.3f}")
    session.close()
