"""model=resnet at 8 limits (on the CPU 2), between what persists between steps and what it takes without a limit."""

import math
from pathlib import Path

import helpers
from gpu import on_gpu

from .. import jobs
from ..table import Table

SHARES = {"cuda": (0.9, 0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25), "cpu": (0.6, 0.3)}
STEPS = 6


def check(table: Table, device: str, folder: Path) -> None:
    """One row per limit, and one for all."""
    settings = jobs.overrides(device, "resnet", "model.norm=batch", f"train.max_steps={STEPS}", "checkpointing=off")
    free = jobs.unlimited(folder / "free", *settings)
    restarts, shares = 0, SHARES[device]
    for share in shares:
        limit = on_gpu.limit_between(free, share)
        name = f"limit {jobs.text(limit)} (a run without takes {jobs.text(free.peak_memory_bytes)})"
        expected = (
            f"{STEPS} steps of {free.samples // STEPS} samples, finite losses, at most 20 MiB above the limit reserved"
        )
        with table.attempt(name, expected):
            run_dir = folder / f"share_{share}"
            result = on_gpu.launched(run_dir, *settings, f"memory.limit={limit}")
            restarts += result.oom_restarts
            losses = [line["loss"] for line in helpers.metrics(run_dir)]
            met = (result.steps, result.samples) == (STEPS, free.samples) and all(map(math.isfinite, losses))
            table.expect(
                name,
                expected,
                f"{result.steps} steps, {result.samples} samples, micro-batch {result.micro_size}, "
                f"{jobs.errors(result.oom_restarts)}, {jobs.text(result.peak_reserved_bytes)} reserved",
                met and result.peak_reserved_bytes <= limit + 20 * on_gpu.MIB,
            )
    table.expect(
        f"errors that the {len(shares)} runs recovered from",
        f"at least {len(shares)}",
        str(restarts),
        restarts >= len(shares),
    )
