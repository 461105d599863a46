"""What a plan is compared with: the peak of a real run."""

import contextlib

import runs

from trainapp.training import loop


def peak(run_dir, *overrides):
    """Bytes of three training steps."""
    with contextlib.closing(runs.prepare(run_dir, *overrides)) as run:
        for _ in range(3):
            loop.train_step(run)
            loop.update_weight_average(run)
    return run.memory.peak
