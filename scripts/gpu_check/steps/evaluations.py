"""Memory over 40 evaluations (on the CPU 10): each iterates anew over the data, with its copies on another stream."""

from pathlib import Path

import runs
import torch
from gpu.on_gpu import MIB

from trainapp.training import loop
from trainapp.training.evaluate import evaluate

from .. import jobs
from ..table import Table

TIMES = {"cuda": 40, "cpu": 10}


def check(table: Table, device: str, folder: Path) -> None:
    """A row for allocated bytes and one for reserved ones."""
    settings = jobs.overrides(device, "mlp", "train.max_steps=1000", "checkpointing=off", "every.eval=1")
    run = runs.prepare(folder / "run", *settings, "batch.eval_micro_size=32")
    allocated, reserved = [], []
    try:
        for _ in range(TIMES[device]):
            loop.train_step(run)
            evaluate(run)
            allocated.append(jobs.live_bytes(device))
            reserved.append(torch.cuda.memory_reserved() if device == "cuda" else 0)
    finally:
        run.close()
    # The first evaluations still fill the cache.
    growth = allocated[-1] - allocated[4]
    name = f"allocated, from the 5th to the {TIMES[device]}th evaluation"
    table.expect(name, "at most 1 MiB", jobs.text(growth), growth <= MIB)
    name = f"reserved, from the 5th to the {TIMES[device]}th evaluation"
    if device == "cpu":
        table.needs_cuda(name)
        return
    growth = reserved[-1] - reserved[4]
    got = f"{jobs.text(growth)}, of {jobs.text(reserved[4])}"
    table.expect(name, f"at most {jobs.text(20 * MIB)}", got, growth <= 20 * MIB)
