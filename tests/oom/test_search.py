"""The search for the size: where it ends, what it costs, that it ends at all."""

import logging
from pathlib import Path

import pytest

from trainapp.data.size_search import SizeSearch

from .conftest import tiny
from .inject import Recorded

# 64 numbers in, two hidden layers: bytes grow linearly with the batch.
LINEAR = ("model=mlp", "model.width=64", "data=digits", "optimizer=sgd", "train.ema=null", "batch.micro_size=auto")


pytestmark = pytest.mark.usefixtures("without_pictures")


def peak_at(run_dir: Path, size: int, global_size: int) -> int:
    """Bytes that a step with this micro-batch uses at most."""
    changes = {"batch.global_size": global_size, "batch.micro_size": size, "train.max_steps": 2}
    return Recorded(tiny(run_dir, *LINEAR, changes=changes)).run.memory.peak


def limit_for(run_dir: Path, size: int, global_size: int = 128) -> int:
    """A limit in which `size` fits and `size` + 1 does not."""
    peak, more = peak_at(run_dir / "a", size, global_size), peak_at(run_dir / "b", size + 1, global_size)
    assert more > peak + 2
    return (peak + more) // 2


def each_sample_once(recorded: Recorded, epochs: int) -> None:
    """Every epoch that was finished saw each sample once."""
    for epoch in range(epochs):
        seen = sorted(i for _, e, indices in recorded.fetched if e == epoch for i in indices)
        assert seen == list(range(recorded.run.batches.samples))


@pytest.mark.parametrize("global_size", [128, 256])
@pytest.mark.parametrize(("grow", "wanted"), [(True, range(95, 101)), (False, range(64, 65))])
def test_where_100_fits(tmp_path, global_size, grow, wanted):
    limit = limit_for(tmp_path, 100, global_size)
    overrides = (f"batch.global_size={global_size}", f"memory.limit={limit}", f"oom.grow={str(grow).lower()}")
    recorded = Recorded(tiny(tmp_path / "run", *LINEAR, "train.max_steps=null", "train.max_epochs=4", *overrides))
    micro = recorded.run.state.micro
    assert micro.size in wanted
    halvings = {128: 1, 256: 2}[global_size]
    assert len(recorded.failures) <= halvings + (2 if grow else 0)
    assert recorded.run.memory.peak <= limit
    each_sample_once(recorded, 4)
    if grow:
        assert micro.search_has_ended


def test_the_log_says_where_the_search_ended(tmp_path, caplog):
    limit = limit_for(tmp_path, 100)
    overrides = ("batch.global_size=128", f"memory.limit={limit}", "oom.grow=true", "train.max_steps=40")
    with caplog.at_level(logging.INFO):
        recorded = Recorded(tiny(tmp_path / "run", *LINEAR, *overrides))
    size = recorded.run.state.micro.size
    ended = [r.getMessage() for r in caplog.records if "search" in r.getMessage() and "ended" in r.getMessage()]
    assert len(ended) == 1
    assert str(size) in ended[0]


def search_with(fits: int, start: int, clean_steps: int = 3, base: int = 0, per_sample: int = 10) -> SizeSearch:
    """The search on a device where `fits` samples fit, run until it ends."""
    search, budget = SizeSearch(start, clean_steps), base + fits * per_sample + per_sample // 2
    search.failures = search.steps = 0
    for _ in range(500):
        search.steps += 1
        needed = base + search.size * per_sample
        if needed > budget:
            search.failures += 1
            assert search.failed(search.size)
        else:
            search.succeeded(search.size)
            if search.is_proven and search.search_has_ended:
                return search
    raise AssertionError("the search did not end")


@pytest.mark.parametrize("base", [0, 1000, 9000, 100_000])  # the last: a model that fills 99% of the device
@pytest.mark.parametrize("start", [128, 256])
def test_halving_alone_would_leave_a_third_idle(start, base):
    search = search_with(100, start, base=base)
    assert 95 <= search.size <= 100
    assert search.failures <= (1 if start == 128 else 2) + 2
    assert SizeSearch(128, grow=False).failed(128) is True


def test_what_fits_at_once_is_not_searched():
    search = search_with(128, 128)
    assert (search.size, search.failures, search.steps) == (128, 0, 3)


def test_fits_once_is_not_fits_again():
    # Proven, then it fails after all: the search goes down and does not come back to that size.
    search = SizeSearch(64)
    for _ in range(3):
        search.succeeded(64)
    assert (search.works, search.is_proven) == (64, True)
    assert search.failed(search.size)
    assert (search.size, search.works, search.fails) == (32, 0, 64)
    sizes = set()
    for _ in range(40):
        sizes.add(search.size)
        search.succeeded(search.size)
    assert max(sizes) < 64
    assert search.search_has_ended


def test_a_failed_try_goes_back_to_what_works():
    search = SizeSearch(128)
    assert search.failed(search.size)
    assert search.size == 64
    tried = [search.succeeded(64) for _ in range(3)][-1]
    assert 64 < tried < 128
    assert search.failed(search.size)
    assert (search.size, search.fails) == (64, tried)


def test_the_smallest_cannot_fail():
    search = SizeSearch(4, smallest=2)
    assert search.failed(search.size)
    assert (search.size, search.failed(search.size)) == (2, False)


def test_ragged_steps_prove_nothing():
    search = SizeSearch(64)
    for _ in range(10):
        search.succeeded(29)  # the epoch's last step
    assert not search.is_proven


def test_failures_with_the_same_samples_are_one_failure():
    """With 1,024 samples in the step, 4096 and 2048 run the same micro-batch."""
    search, failures = SizeSearch(4096), 0
    while search.failed(min(search.size, 1024)):
        failures += 1
        assert search.size == 1024 >> failures
    assert failures == 10  # 512, 256, ... 1; the eleventh attempt, with 1, is the last
    search = SizeSearch(4096)
    search.failed(1024)
    assert (search.size, search.fails) == (512, 1024)


def test_what_failed_with_few_samples_is_not_tried_with_them_again():
    """What is proven for more samples says nothing any more, and the same few would run again."""
    search = SizeSearch(64)
    for _ in range(3):
        search.succeeded(64)
    assert search.failed(29)
    assert (search.size, search.works, search.fails) == (14, 0, 29)


def test_more_than_the_size_may_have_run():
    """A shape that is new to one rank alone is not cut; its size has not failed yet."""
    search = SizeSearch(8)
    assert search.failed(64)
    assert (search.size, search.fails) == (8, 64)


def test_an_evaluation_that_is_one_batch_fails_once_for_it(tmp_path):
    """The 360 digits are one batch for every size above."""
    changes = {"batch.eval_micro_size": 2880, "batch.micro_size": 8, "batch.global_size": 8, "every.eval": 1}
    changes["train.max_steps"] = 1
    peak = Recorded(tiny(tmp_path / "a", *LINEAR, changes=changes | {"batch.eval_micro_size": 180})).run.memory.peak
    recorded = Recorded(tiny(tmp_path / "b", *LINEAR, changes=changes | {"memory.limit": peak}))
    assert [(f.phase, f.old_size, f.new_size) for f in recorded.failures] == [("evaluate", 360, 180)]
    assert recorded.run.memory.peak <= peak
