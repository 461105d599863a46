"""`oom.keep_global_batch=false`: when the global batch falls, all that was measured in it is measured again."""

import pytest
import runs
import torch

from trainapp.data.progress import Progress
from trainapp.data.source import TrainBatches
from trainapp.training import loop

DIGITS = 1437  # training samples


def smaller(tmp_path, *overrides: str, steps: int = 3, size: int = 8):
    """A run whose global batch falls from 16 to `size` after some steps."""
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], "oom.keep_global_batch=false", *overrides)
    for _ in range(steps):
        loop.train_step(run)
    run.set_global_size(size)
    return run


def test_cadences_and_schedule(tmp_path):
    run = smaller(
        tmp_path, "train.max_steps=null", "train.max_epochs=2", "every.log=7", "every.eval=1 epochs",
        "every.save=50 percent", "schedule.warmup=0", "schedule.shape=linear",
    )  # fmt: skip
    run.close()
    left = -(-(DIGITS - 3 * 16) // 8) + -(-DIGITS // 8)
    assert run.limits.log == 7
    assert run.limits.evaluate == -(-DIGITS // 8) == 180
    assert run.limits.save == (3 + left + 1) // 2  # rounded up from a half
    assert run.state.update.schedule(3 + left) == pytest.approx(0.0)
    assert run.state.update.schedule(2 + left) > 0


def test_the_end_is_where_the_schedule_ends(tmp_path):
    """Every epoch has a partial step of its own."""
    run = smaller(
        tmp_path, "train.max_steps=null", "train.max_epochs=3", "schedule=constant", "every.log=null",
        "data=synthetic_images", "data.size=50", "every.save=100 percent",
    )  # fmt: skip
    loop.train(run)
    run.close()
    progress = run.state.progress
    assert (progress.epoch, progress.samples) == (3, 150)
    assert progress.step == 4 + 7 + 7  # 48 of 50 samples at 16, then 2; then 50 at 8, twice
    assert run.limits.save == progress.step


@pytest.mark.parametrize(("steps", "size"), [(0, 7), (1, 15), (3, 1)])
def test_drop_last(tmp_path, steps, size):
    """No step has fewer samples, none is left out that would have made one, in this epoch and the next."""
    run = smaller(
        tmp_path, "train.max_steps=null", "train.max_epochs=2", "schedule=constant", "every.log=null",
        "data=synthetic_images", "data.size=50", "data.drop_last=true", "checkpointing=off", steps=steps, size=size,
    )  # fmt: skip
    seen = []
    advance = run.batches.advance

    def noting(progress):
        seen.append((progress.epoch, len(run.batches.share(progress).numbers)))
        advance(progress)

    run.batches.advance = noting
    loop.train(run)
    run.close()
    assert {number for _, number in seen} == {size}
    first = (50 - 16 * steps) // size if steps < 3 else 0  # the third step of 16 has ended the epoch
    assert [epoch for epoch, _ in seen] == [0] * first + [1] * (50 // size)


def test_an_end_of_the_epoch_that_a_smaller_step_moves():
    """With drop_last, 10 of 40 samples are left out at 30 per step, and at 15; none at 10."""
    batches = TrainBatches(range(40), global_size=30, seed=0, device=torch.device("cpu"), drop_last=True)
    assert (batches.epoch_samples, batches.steps_per_epoch, batches.share(Progress()).after) == (30, 1, (1, 0))
    batches.global_size = 15
    assert (batches.epoch_samples, batches.steps_per_epoch, batches.share(Progress()).after) == (30, 2, (0, 15))
    batches.global_size = 10
    assert (batches.epoch_samples, batches.steps_left(30)) == (40, 1)
