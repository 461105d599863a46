"""For any budget, batch and data: each sample once per epoch, the size never 0, the search ends."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainapp.data.size_search import SizeSearch
from trainapp.errors import UserError

from .conftest import tiny
from .inject import Recorded

QUICK = settings(max_examples=300, deadline=None)
REAL = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


pytestmark = pytest.mark.usefixtures("without_pictures")


@QUICK
@given(
    start=st.integers(1, 4096),
    share=st.floats(0.0003, 1.2),
    base=st.integers(0, 10**9),
    per_sample=st.integers(1, 10**7),
    curve=st.floats(0.8, 1.3),
    clean_steps=st.integers(1, 5),
    smallest=st.integers(1, 2),
)
@example(start=128, share=100.5 / 128, base=0, per_sample=1000, curve=1.0, clean_steps=3, smallest=1)
def test_the_search_ends(start, share, base, per_sample, curve, clean_steps, smallest):
    """curve: bytes grow with size ** curve; unless it is 1, the linear prediction is wrong."""

    def needed(size):
        return base + int(per_sample * size**curve)

    budget = base + int(per_sample * (start * share) ** curve)
    search, failures, steps, failed_sizes = SizeSearch(max(start, smallest), clean_steps, smallest=smallest), 0, 0, []
    while not (search.is_proven and search.search_has_ended):
        steps += 1
        assert smallest <= search.size <= max(start, smallest)
        if needed(search.size) > budget:
            failures += 1
            failed_sizes.append(search.size)
            if not search.failed(search.size):
                assert search.size == smallest
                return
        else:
            search.succeeded(search.size)
        assert steps < 60 * clean_steps
    assert needed(search.size) <= budget
    assert len(failed_sizes) == len(set(failed_sizes)), "no size fails twice"
    # Halvings, then tries between two converging bounds.
    assert failures <= math.ceil(math.log2(max(2, start))) + 6
    best = max(size for size in range(search.size, max(start, smallest) + 1) if needed(size) <= budget)
    if abs(curve - 1) < 1e-9:
        assert search.size >= 0.93 * best - 1


REAL_ARGUMENTS = {
    "samples": st.integers(1, 90),
    "global_size": st.integers(1, 64),
    "kilobytes": st.integers(0, 60),
    "drop_last": st.booleans(),
    "eval_every": st.sampled_from([None, 1, 3]),
}


def real_run(samples, global_size, kilobytes, drop_last, eval_every):
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
            assert "nothing is left to halve" in told or "so no batch is left" in told or "before any batch" in told
            return
    assert recorded.run.sizes.train.size >= 1
    assert recorded.run.memory.peak <= config.memory.limit
    epoch_samples = recorded.run.batches.epoch_samples
    for epoch in range(3):
        seen = [i for _, e, indices in recorded.fetched if e == epoch for i in indices]
        assert len(seen) == len(set(seen)) == epoch_samples
    assert recorded.run.state.progress.samples == 3 * epoch_samples
    assert recorded.run.state.progress.step == 3 * recorded.run.batches.steps_per_epoch


@pytest.mark.slow
@REAL
@given(**REAL_ARGUMENTS)
@example(samples=33, global_size=32, kilobytes=6, drop_last=False, eval_every=1)
def test_real_runs(**drawn):
    real_run(**drawn)


@pytest.mark.slow
@settings(REAL, max_examples=60)
@given(**REAL_ARGUMENTS)
def test_many_real_runs(**drawn):
    real_run(**drawn)
