"""For any budget, batch and data: each sample once per epoch, the size never 0, the search ends."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainapp.errors import UserError

from .conftest import tiny
from .inject import Recorded

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.integers(1, 90),
    global_size=st.integers(1, 64),
    kilobytes=st.integers(0, 60),
    drop_last=st.booleans(),
    eval_every=st.sampled_from([None, 1, 3]),
)
@example(samples=33, global_size=32, kilobytes=6, drop_last=False, eval_every=1)
def test_real_runs(samples, global_size, kilobytes, drop_last, eval_every):
    """A real run under a real limit, from almost nothing to plenty."""
    static = 3 * 4 * (64 * 8 + 8 + 8 * 10 + 10)  # parameters, gradients and momentum
    overrides = (
        "model=mlp",
        "model.width=8",
        "model.depth=2",
        "data=synthetic_images",
        "data.image_shape=[1,8,8]",
        f"data.drop_last={str(drop_last).lower()}",
        "optimizer=sgd",
        "train.ema=null",
        "train.max_steps=null",
        "train.max_epochs=3",
        "batch.micro_size=auto",
        "every.log=null",
        "oom.grow=true",
        "data.val_size=20",
    )
    changes = {
        "data.size": samples,
        "batch.global_size": global_size,
        "memory.limit": static + 3000 + kilobytes * 1024,
        "every.eval": eval_every,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = tiny(Path(folder), *overrides, changes=changes)
        try:
            recorded = Recorded(config)
        except UserError as error:
            told = str(error)
            assert "nothing is left to halve" in told or "so no batch is left" in told
            return
    assert recorded.run.sizes.train.size >= 1
    assert recorded.run.memory.peak <= config.memory.limit
    epoch_samples = recorded.run.batches.epoch_samples
    for epoch in range(3):
        seen = [i for _, e, indices in recorded.fetched if e == epoch for i in indices]
        assert len(seen) == len(set(seen)) == epoch_samples
    assert recorded.run.state.progress.samples == 3 * epoch_samples
    assert recorded.run.state.progress.step == 3 * recorded.run.batches.steps_per_epoch
