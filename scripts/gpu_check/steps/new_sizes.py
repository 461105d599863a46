"""Seconds of the steps at each new micro-batch: the first (kernels loaded on first use), the slowest after it (cuDNN
times its algorithms once the size is proven), and a usual one.
"""

import time
from pathlib import Path

import runs

from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.training import loop

from .. import jobs
from ..table import Table

SHARES = (1.0, 0.5, 0.25, 0.375, 0.3125, 1.0)  # of the global batch; the last repeats the first
AFTER = 7  # steps after the first: two more prove the size, one times the algorithms, the others are usual


def check(table: Table, device: str, folder: Path) -> None:
    """One row per size; nothing is expected of them."""
    settings = jobs.overrides(device, "resnet", "train.max_steps=1000", "checkpointing=off", "every.log=null")
    run = runs.prepare(folder / "run", *settings)
    try:
        for number, share in enumerate(SHARES):
            size = int(share * run.state.global_size)
            run.sizes.train = MicroBatchSizes(size, grow=False)
            seconds = []
            for _ in range(1 + AFTER):
                started = time.monotonic()
                loop.train_step(run)
                jobs.synchronise(device)
                seconds.append(time.monotonic() - started)
            later = sorted(seconds[1:])
            again = " again" if number and share == SHARES[0] else ""
            got = f"first {seconds[0]:.3f} s, slowest later {later[-1]:.3f} s, then {later[AFTER // 2]:.3f} s"
            table.measured(f"steps with micro-batches of {size}{again}", got)
    finally:
        run.close()
