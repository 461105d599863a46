"""What ends or changes a process, each in one of its own: a device-side assert, another allocator, fp16's overflow."""

from pathlib import Path
from typing import Any

import helpers
import runs
import torch
from torch import nn

from trainapp.train import losses

from .. import jobs
from ..table import Table

STEPS = 4


def check(table: Table, device: str, folder: Path) -> None:
    """One row each."""
    expected = "exit code 1, one message that says that the device is lost and how to continue"
    if device == "cpu":
        table.needs_cuda("a device-side assert", "the allocator cudaMallocAsync")
    else:
        with table.attempt("a device-side assert", expected):
            device_assert(table, folder, expected)
        expected = f"exit code 0, {STEPS} steps, at least 1 error recovered from"
        with table.attempt("the allocator cudaMallocAsync", expected):
            other_allocator(table, folder, expected)
    expected = f"exit code 0, {STEPS} steps, at least 1 skipped"
    with table.attempt("fp16 with a loss scale that overflows", expected):
        overflow(table, device, folder, expected)


def past_the_end(model: nn.Module, batch: Any) -> tuple[Any, ...]:
    """Classification whose targets are no classes: on CUDA the kernel's assertion fails, and with it the context."""
    return losses.classification(model, {**batch, "targets": batch["targets"] + 1000})


def device_assert(table: Table, folder: Path, expected: str) -> None:
    """With a task whose targets are out of range."""
    task = ("user_packages=[gpu_check]", "task=gpu_check.steps.faults.past_the_end", "objective='min loss'")
    done = jobs.command(folder / "assert", *jobs.overrides("cuda", "mlp", "train.max_steps=2", *task))
    said = next((line for line in done.stderr.splitlines() if "the device is lost for this process" in line), "")
    got = f"exit code {done.returncode}, {said[:120] or jobs.last_line(done.stderr)}"
    table.expect("a device-side assert", expected, got, done.returncode == 1 and bool(said))


def other_allocator(table: Table, folder: Path, expected: str) -> None:
    """CUDA's own asynchronous allocator in place of torch's."""
    settings = jobs.overrides("cuda", "mlp", "checkpointing=off")
    free = jobs.unlimited(folder / "free", *settings, "train.max_steps=2")
    run_dir = folder / "async"
    done = jobs.command(
        run_dir,
        *settings,
        f"train.max_steps={STEPS}",
        f"memory.limit={jobs.limit_between(free, 0.5)}",
        env={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    )
    got = f"exit code {done.returncode}"
    met = done.returncode == 0
    if met:
        result = helpers.result(run_dir)
        got += f", {result['steps']} steps, {result['oom_restarts']} errors"
        met = result["steps"] == STEPS and result["oom_restarts"] > 0
    else:
        got += f": {jobs.last_line(done.stderr)}"
    table.expect("the allocator cudaMallocAsync", expected, got, met)


def overflow(table: Table, device: str, folder: Path, expected: str) -> None:
    """The scaler skips steps until the scale fits."""
    run_dir = folder / "fp16"
    scale = ("precision=fp16", "precision.initial_scale=1e9")
    done = jobs.command(run_dir, *jobs.overrides(device, "mlp", f"train.max_steps={STEPS}", *scale))
    got, met = f"exit code {done.returncode}", done.returncode == 0
    if met:
        values = torch.load(runs.checkpoint(run_dir, STEPS) / "values.pt", weights_only=True)
        skipped = values["progress"]["skipped"]
        got += f", {helpers.result(run_dir)['steps']} steps, {skipped} skipped"
        met = skipped > 0
    else:
        got += f": {jobs.last_line(done.stderr)}"
    table.expect("fp16 with a loss scale that overflows", expected, got, met)
