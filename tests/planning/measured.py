"""What a plan is compared with: the peak of a real run."""

import runs

from trainapp.training import loop


def peak(run_dir, *overrides):
    """Bytes of three training steps."""
    run = runs.prepare(run_dir, *overrides)
    try:
        for _ in range(3):
            loop.train_step(run)
            loop.update_weight_average(run)
    finally:
        run.close()
    return run.memory.peak
