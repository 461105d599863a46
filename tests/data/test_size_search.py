"""The policy alone: which size comes next, where the search ends, and that it always ends."""

import pytest

from trainapp.data.size_search import FailedAllocation, SizeSearch


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
    # Proven, but then it fails: the search goes down and does not return to that size.
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
    """With 1,024 samples per step, 4096 and 2048 run the same micro-batch."""
    search, failures = SizeSearch(4096), 0
    while search.failed(min(search.size, 1024)):
        failures += 1
        assert search.size == 1024 >> failures
    assert failures == 10  # 512, 256, ... 1; the eleventh attempt, with 1, is the last
    search = SizeSearch(4096)
    search.failed(1024)
    assert (search.size, search.fails) == (512, 1024)


def test_what_failed_with_few_samples_is_not_tried_with_them_again():
    """A success with more samples no longer counts, or the same few samples would run again."""
    search = SizeSearch(64)
    for _ in range(3):
        search.succeeded(64)
    assert search.failed(29)
    assert (search.size, search.works, search.fails) == (14, 0, 29)


def test_more_than_the_size_may_have_run():
    """A shape that is new on only one rank is not cut; its size has not failed yet."""
    search = SizeSearch(8)
    assert search.failed(64)
    assert (search.size, search.fails) == (8, 64)


HERE = ("forward", "head")
TOO_MUCH = FailedAllocation(HERE, requested=90, fixed_bytes=20, limit=100)  # 90 + 20 > 100
ENOUGH_ALONE = FailedAllocation(HERE, requested=70, fixed_bytes=20, limit=100)


def sizes_tried(start: int, fits, failure_at, smallest: int = 1, grow: bool = False) -> tuple[list[int], bool]:
    """Every size tried until the first proven one (or until none is left), and whether one fits."""
    search, tried = SizeSearch(start, grow=grow, smallest=smallest), []
    while not search.is_proven:
        tried.append(search.size)
        assert len(tried) < 50
        if fits(search.size):
            search.succeeded(search.size)
        elif not search.failed(search.size, failure_at(search.size)):
            return tried, False
    return tried, True


def test_three_alike_failures_end_the_search():
    never = lambda size: False  # noqa: E731
    assert sizes_tried(1024, never, lambda size: TOO_MUCH) == ([1024, 512, 256], False)
    # In all other cases the search halves.
    halving = [1024 >> n for n in range(11)]
    assert sizes_tried(1024, never, lambda size: None) == (halving, False)
    assert sizes_tried(1024, never, lambda size: FailedAllocation(HERE, None, 20, 100)) == (halving, False)
    assert sizes_tried(1024, never, lambda size: ENOUGH_ALONE) == (halving, False)
    assert sizes_tried(1024, never, lambda size: FailedAllocation(HERE, size * 90, 20, 100)) == (halving, False)
    assert sizes_tried(1024, never, lambda size: FailedAllocation(("forward", str(size)), 90, 20, 100)) == (
        halving,
        False,
    )


def test_the_same_size_again_is_the_same_failure():
    search = SizeSearch(4096)
    assert all(search.failed(1024, TOO_MUCH) for _ in range(3))


@pytest.mark.parametrize("grow", [False, True])
def test_a_run_that_fits_is_not_stopped_by_a_coincidence(grow):
    """Each layer is twice as wide as the one before, so it requests the same amount at half the size."""
    at = {1024: "first", 512: "second", 256: "third"}
    tried, fits = sizes_tried(
        1024,
        lambda size: size <= 200,
        lambda size: FailedAllocation(("forward", at.get(size, "")), 90, 20, 100),
        grow=grow,
    )
    assert fits
    assert tried[:6] == [1024, 512, 256, 128, 128, 128]
    assert (190 <= tried[-1] <= 200) if grow else len(tried) == 6


def test_a_success_in_between_makes_it_another_matter():
    search = SizeSearch(64)
    assert search.failed(64, TOO_MUCH)
    search.succeeded(32)
    assert search.failed(32, TOO_MUCH)
    assert search.size == 16


def test_the_same_size_twice_shows_nothing():
    search = SizeSearch(64)
    assert search.failed(64, TOO_MUCH)
    assert search.failed(64, TOO_MUCH)
    assert search.size == 32
