"""What ends or changes a process, each in one of its own: a device-side assert, another allocator, fp16's overflow."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers
import runs
import torch
from gpu import on_gpu

from .. import jobs
from ..table import Table

STEPS = 4
OVERFLOW, ASSERT = "fp16 with a loss scale that overflows", "a device-side assert"
ALLOCATOR, ASYNC = "the allocator cudaMallocAsync", jobs.overrides("cuda", "mlp", "checkpointing=off")


def check(table: Table, device: str, folder: Path) -> None:
    """One row each; the commands run at the same time."""
    parts: dict[str, Callable[..., None]] = {OVERFLOW: functools.partial(overflow, device=device)}
    if device == "cpu":
        table.needs_cuda(ASSERT, ALLOCATOR)
    else:
        parts[ASSERT] = device_assert
        with table.attempt(ALLOCATOR, "a limit"):
            free = jobs.unlimited(folder / "free", *ASYNC, "train.max_steps=2")
            parts[ALLOCATOR] = functools.partial(other_allocator, limit=on_gpu.limit_between(free, 0.5))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: attempted(table, name, parts[name], folder), parts))


def attempted(table: Table, name: str, part: Callable[..., None], folder: Path) -> None:
    """A row for whatever goes wrong."""
    with table.attempt(name, "a command that ends as it should"):
        part(table, name, folder)


def device_assert(table: Table, name: str, folder: Path) -> None:
    """With a task whose targets are no classes."""
    expected = "exit code 1, one message that says that the device is lost and how to continue"
    task = ("user_packages=[gpu]", "task=gpu.on_gpu.past_the_end", "objective='min loss'")
    done = on_gpu.command(folder / "assert", *jobs.overrides("cuda", "mlp", "train.max_steps=2", *task))
    said = next((line for line in done.stderr.splitlines() if "the device is lost for this process" in line), "")
    got = f"exit code {done.returncode}, {said[:120] or jobs.last_line(done.stderr)}"
    table.expect(name, expected, got, done.returncode == 1 and bool(said))


def other_allocator(table: Table, name: str, folder: Path, limit: int) -> None:
    """CUDA's own asynchronous allocator in place of torch's."""
    expected = f"exit code 0, {STEPS} steps, at least 1 error recovered from"
    run_dir = folder / "async"
    done = on_gpu.command(
        run_dir,
        *ASYNC,
        f"train.max_steps={STEPS}",
        f"memory.limit={limit}",
        env={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    )
    got = f"exit code {done.returncode}"
    met = done.returncode == 0
    if met:
        result = helpers.result(run_dir)
        got += f", {result['steps']} steps, {jobs.errors(result['oom_restarts'])}"
        met = result["steps"] == STEPS and result["oom_restarts"] > 0
    else:
        got += f": {jobs.last_line(done.stderr)}"
    table.expect(name, expected, got, met)


def overflow(table: Table, name: str, folder: Path, device: str) -> None:
    """The scaler skips steps until the scale fits."""
    expected = f"exit code 0, {STEPS} steps, at least 1 skipped"
    run_dir = folder / "fp16"
    scale = ("precision=fp16", "precision.initial_scale=1e9")
    done = on_gpu.command(run_dir, *jobs.overrides(device, "mlp", f"train.max_steps={STEPS}", *scale))
    got, met = f"exit code {done.returncode}", done.returncode == 0
    if met:
        values = torch.load(runs.checkpoint(run_dir, STEPS) / "values.pt", weights_only=True)
        skipped = values["progress"]["skipped"]
        got += f", {helpers.result(run_dir)['steps']} steps, {skipped} skipped"
        met = skipped > 0
    else:
        got += f": {jobs.last_line(done.stderr)}"
    table.expect(name, expected, got, met)
