"""The policy alone: which size comes next, where the search ends, and that it always ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainapp.sizes.search import RESERVE_OF_RANKS, FailedAllocation, PeakSample, SizeSearch


def searched(first, needed, limit, resident=0, is_measured=True, clean_steps=3, reserve=0.0) -> SizeSearch:
    """A search that has ended, with its failures and steps. needed: bytes of a size beyond what is resident."""
    search = SizeSearch(first, clean_steps, reserve=reserve)
    search.failures, search.steps, headroom = 0, 0, limit - resident
    for _ in range(500):
        search.steps += 1
        if needed(search.size) > headroom:
            search.failures += 1
            if not search.record_failure(search.size):
                return search
        else:
            measured = PeakSample(needed(search.size), headroom) if is_measured else None
            search.record_success(search.size, measured)
            if search.is_validated and search.search_has_ended:
                return search
    raise AssertionError("the search did not end")


def is_near(size: int, largest: int) -> bool:
    """Whether the size is within 5% of the largest that fits; below 20 samples, at most one less."""
    return size <= largest and size >= (largest - 1 if largest < 20 else 0.95 * largest)


SHAPES = {
    "a line": lambda n: 10 * n,
    "a line above temporaries of their own": lambda n: 200 + 10 * n,
    "steeper from 30 on": lambda n: 10 * n + 4 * max(0, n - 30),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("largest", [1, 2, 7, 13, 19, 20, 33, 64, 100, 333])
@pytest.mark.parametrize("times", [1.1, 2, 3.7, 8])
def test_at_most_four_failures_to_the_largest_that_fits(shape, largest, times):
    needed = SHAPES[shape]
    limit = 5000 + needed(largest) + 5
    search = searched(max(largest + 1, int(times * largest)), needed, limit, resident=5000)
    assert is_near(search.size, largest), search
    assert search.failures <= 4


@pytest.mark.parametrize("largest", [33, 64, 100, 333])
@pytest.mark.parametrize("times", [1.1, 2, 3.7, 8])
def test_several_ranks_give_back_three_percent(largest, times):
    """And it ends as early: not one sample after the other."""
    first = max(largest + 1, int(times * largest))
    search = searched(first, lambda n: 10 * n, 10 * largest, reserve=RESERVE_OF_RANKS)
    alone = searched(first, lambda n: 10 * n, 10 * largest)
    assert search.size <= 0.97 * largest
    assert search.size >= 0.91 * largest
    assert search.steps <= alone.steps + 2 * search.clean_steps


def test_far_from_what_fits_it_takes_two_more():
    search = searched(64 * 30, lambda n: 10 * n, 305)
    assert is_near(search.size, 30)
    assert search.failures <= 6


@pytest.mark.parametrize("start", [128, 256])
def test_without_peaks_it_bisects(start):
    search = searched(start, lambda n: n, 100, is_measured=False)
    assert is_near(search.size, 100)
    assert search.failures <= 4
    assert SizeSearch(128, grow=False).record_failure(128) is True


def test_half_after_an_error_a_quarter_after_two_in_a_row():
    search, sizes = SizeSearch(1024), []
    while search.record_failure(search.size):
        sizes.append(search.size)
    assert sizes == [512, 128, 32, 8, 2, 1]
    search = SizeSearch(64)
    search.record_failure(64)
    search.record_success(32)
    search.record_failure(32)
    assert search.size == 16
    search = SizeSearch(1024, grow=False)  # an excluded size stays excluded
    assert [search.record_failure(search.size) and search.size for _ in range(3)] == [512, 256, 128]


def test_the_line_less_two_percent_is_tried_once_a_size_is_validated():
    search = SizeSearch(128)
    search.record_failure(128)
    assert [search.record_success(64, PeakSample(500, 800)) for _ in range(3)] == [None, None, 100]  # 102.4, less 2%
    # The line through both sizes: the first one's was too low.
    assert [search.record_success(100, PeakSample(700, 800)) for _ in range(3)] == [None, None, 115]
    assert [search.record_success(115, PeakSample(780, 800)) for _ in range(3)] == [None, None, None]
    assert search.search_has_ended


def test_the_highest_peak_of_the_steps_that_prove_a_size_counts():
    search = SizeSearch(128)
    search.record_failure(128)
    search.record_success(64, PeakSample(790, 800))
    search.record_success(64, PeakSample(400, 800))
    assert search.record_success(64, PeakSample(400, 800)) == 68  # 5% more, not 125


def test_a_failure_disproves_the_line():
    search = SizeSearch(128, clean_steps=1)
    search.record_failure(128)
    assert search.record_success(64, PeakSample(500, 900)) == 112
    search.record_failure(112)
    assert search.record_success(64, PeakSample(500, 900)) == 88  # the middle, since the line says that 112 fits


def test_fits_once_is_not_fits_again():
    """Validated, but then it smallest_excluded: the search goes down and does not return to that size."""
    search = SizeSearch(64)
    for _ in range(3):
        search.record_success(64)
    assert (search.largest_validated, search.is_validated) == (64, True)
    assert search.record_failure(search.size)
    assert (search.size, search.largest_validated, search.smallest_excluded) == (32, 0, 64)
    sizes = set()
    for _ in range(40):
        sizes.add(search.size)
        search.record_success(search.size)
    assert max(sizes) < 64
    assert search.search_has_ended


def test_a_failed_try_goes_back_to_what_works():
    search = SizeSearch(128)
    search.record_failure(128)
    tried = [search.record_success(64) for _ in range(3)][-1]
    assert 64 < tried < 128
    search.record_failure(tried)
    assert (search.size, search.smallest_excluded) == (64, tried)
    assert search.record_success(64) is not None  # it was validated before: one clean step is enough


def test_the_smallest_cannot_fail():
    search = SizeSearch(4, smallest=2)
    assert search.record_failure(search.size)
    assert (search.size, search.record_failure(search.size)) == (2, False)


def test_ragged_steps_prove_nothing():
    search = SizeSearch(64)
    for _ in range(10):
        search.record_success(29)  # the epoch's last step
    assert not search.is_validated


def test_what_failed_with_few_samples_is_not_tried_with_them_again():
    """With 1,024 samples per step, 4096 and 2048 run the same micro-batch."""
    search = SizeSearch(4096)
    search.record_failure(1024)
    assert (search.size, search.smallest_excluded) == (512, 1024)
    search = SizeSearch(64)
    for _ in range(3):
        search.record_success(64)
    assert search.record_failure(29)  # a success with more samples no longer counts, or the same few would run again
    assert (search.size, search.largest_validated, search.smallest_excluded) == (14, 0, 29)


def test_more_than_the_size_may_have_run():
    """A shape that is new on only one rank is not cut; its size has not failed yet."""
    search = SizeSearch(8)
    assert search.record_failure(64)
    assert (search.size, search.smallest_excluded) == (8, 64)


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(1, 4096),
    share=st.floats(0.0003, 1.2),
    base=st.integers(0, 10**9),
    per_sample=st.integers(1, 10**7),
    curve=st.floats(0.8, 1.3),
    clean_steps=st.integers(1, 5),
    is_measured=st.booleans(),
)
def test_it_ends_below_the_limit_whatever_the_memory(start, share, base, per_sample, curve, clean_steps, is_measured):
    """curve: bytes grow with size ** curve; unless it is 1, the line is wrong."""
    tried = []

    def needed(size):
        tried.append(size)
        return base + int(per_sample * size**curve)

    limit = base + int(per_sample * (start * share) ** curve)
    search = searched(start, needed, limit, is_measured=is_measured, clean_steps=clean_steps)
    if search.failures and not search.clean:  # not even one sample fits
        assert search.size == 1
        return
    assert max(tried) <= start
    assert needed(search.size) <= limit
    assert search.failures <= 12


def test_too_few_samples_double_the_size_below_what_failed():
    search = SizeSearch(16)
    search.record_failure(16)
    search.record_failure(8)
    assert search.size == 2
    search.require_more_than(2)
    assert (search.size, search.smallest) == (4, 3)
    assert search.record_failure(4)
    assert search.size == 3
    assert not search.record_failure(3)


def test_a_size_that_is_never_full_is_validated_all_the_same():
    """67 samples in 32 leave 3; with at least 4 in each, 31 is the largest that is run."""
    search = SizeSearch(32, smallest=4)
    for _ in range(3):
        search.record_success(31)
    assert search.is_validated
    assert not SizeSearch(32, smallest=4).is_full_size(28)
    assert not SizeSearch(64, smallest=64).is_full_size(30)  # a batch that stays whole


def test_a_remainder_that_joins_the_smallest_size_fails_twice_at_most():
    """7 samples in 2, of which none may be alone: one micro-batch has 3 of them."""
    search = SizeSearch(2, smallest=2)
    assert search.record_failure(3)
    assert search.size == 2
    assert not search.record_failure(3)


def failure(samples: int, used: int, place: str = "backward (b)", requested: int = 400, length: int = 16):
    return FailedAllocation(place, samples, samples * length, requested, used, limit=1000)


@pytest.mark.parametrize(
    ("before", "after", "repeats"),
    [
        (failure(64, 700), failure(32, 699), True),
        (failure(64, 700), failure(32, 700), True),
        (failure(64, 800), failure(32, 750), True),
        (failure(64, 800), failure(32, 700), False),  # with no sample 600, which fits
        (failure(64, 800), failure(16, 700), True),
        (failure(64, 700), failure(32, 699, requested=200), False),
        (failure(64, 700), failure(32, 699, place="backward (b) with gradients"), False),
        (failure(64, 700), failure(40, 699), False),  # hardly less than before
        (failure(64, 700), failure(32, 699, length=30), False),  # longer samples
        (failure(64, 600), failure(32, 700), False),  # something else has grown
        (failure(64, 700, length=0), failure(32, 699, length=0), False),  # unknown
    ],
)
def test_where_fewer_samples_ask_for_the_same_the_smallest_decides(before, after, repeats):
    search = SizeSearch(64)
    assert search.record_failure(64, before)
    assert search.record_failure(32, after)
    assert search.must_try_smallest is repeats
    assert search.size == (1 if repeats else 8)


def test_the_update_decides_without_the_smallest():
    search = SizeSearch(64)
    assert search.record_failure(64, failure(64, 700)._replace(is_optimizer_update=True))
    assert not search.record_failure(32, failure(32, 700)._replace(is_optimizer_update=True))
    assert search.must_try_smallest


def test_after_the_smallest_has_fitted_the_search_goes_on():
    """Such as a loss in chunks, which asks for the same until the micro-batch is smaller than a chunk."""
    search = SizeSearch(64, clean_steps=1)
    search.record_failure(64, failure(64, 700))
    search.record_failure(32, failure(32, 700))
    assert search.record_success(1, PeakSample(10, 100)) == 9
    assert not search.must_try_smallest
    search.record_failure(9, failure(9, 700))
    assert search.size == 1


def test_it_does_not_give_up_what_has_fitted():
    search = SizeSearch(64)
    search.record_failure(64, failure(64, 700))
    for _ in range(3):
        search.record_success(32)
    assert search.record_failure(48, failure(48, 700))
    assert search.size == 32


@settings(max_examples=300, deadline=None)
@given(
    first=st.integers(2, 4096),
    operations=st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, 40), st.integers(1, 900)), min_size=1, max_size=6
    ),
    limit=st.integers(1, 4000),
    grow=st.booleans(),
)
def test_it_never_gives_up_what_one_sample_would_have_fitted(first, operations, limit, grow):
    """Each operation asks for a fixed number of bytes, in a micro-batch that needs some for each of its samples."""
    search = SizeSearch(first, grow=grow)
    for _ in range(20):
        size = search.size
        found = [(place, used + size * rise, asked) for place, (used, rise, asked) in enumerate(operations)]
        refused = next((one for one in found if one[1] + one[2] > limit), None)
        if refused is None:
            return
        place, used, asked = refused
        if not search.record_failure(size, FailedAllocation(str(place), size, size, asked, used, limit)):
            assert any(used + rise + asked > limit for used, rise, asked in operations)
            assert search.size == 1
            return
    raise AssertionError("the search did not end")


def measured(slope, constant, headroom, sizes, **state):
    """A search that has measured these sizes, the last of which is in force."""
    search = SizeSearch(sizes[-1], largest_validated=sizes[-1], **state)
    search.peaks = {size: PeakSample(constant + slope * size, headroom) for size in sizes}
    return search


@pytest.mark.parametrize(
    ("sizes", "bytes_less", "size", "failing"),
    [
        ((64, 97), 100, 97, 200),  # still fits
        ((64, 97), 3000, 67, 97),  # between two measured sizes
        ((64, 97), 7000, 28, 64),  # below both, on the line through them
        ((97,), 5000, 49, 97),  # through the origin: a constant part is unknown
        ((64, 97), 9900, 1, 64),  # hardly anything fits: the smallest is tried
        ((64, 97), 20000, 1, 64),  # nothing does
    ],
)
def test_a_lower_limit_begins_with_what_fits_by_the_peaks(sizes, bytes_less, size, failing):
    constant = 0 if len(sizes) == 1 else 100
    search = measured(100, constant, 10_000, sizes, smallest_excluded=200)
    assert search.begin_below(bytes_less)
    assert (search.size, search.smallest_excluded, search.clean) == (size, failing, 0)
    fits = constant + 100 * size <= 10_000 - bytes_less
    assert fits or size == 1
    if size < 97:
        assert not search.search_has_ended  # a larger one is tried, up to what is known to fail
        assert search.largest_validated == 0


def test_nothing_is_known_of_a_lower_limit_without_peaks():
    search = SizeSearch(64, smallest_excluded=128)
    assert not search.begin_below(1)
    search.peaks = {32: PeakSample(3200, 6000)}  # of a search that was about to try 64
    assert search.begin_below(3000)
    assert search.size == 29


def test_a_size_for_which_the_cache_is_freed_twice_is_too_large():
    """Once may be chance: the size is repeated. Then memory is too tight for it, though no allocation failed."""
    search = SizeSearch(16, clean_steps=1)
    assert search.record_success(16, has_flushed=True) is None
    assert (search.size, search.clean) == (16, 0)
    assert search.record_success(16, has_flushed=True) == 8
    assert search.smallest_excluded == 16
    assert search.record_success(8) == 12
    assert [search.record_success(12, has_flushed=flushed) for flushed in (True, True)] == [None, 8]
    assert search.record_success(8) == 10


def test_the_smallest_size_and_a_fixed_one_stay_however_tight_memory_is():
    for search in (SizeSearch(1, clean_steps=3), SizeSearch(16, clean_steps=3, grow=False)):
        size = search.size
        assert [search.record_success(size, has_flushed=True) for _ in range(3)] == [None] * 3
        assert (search.size, search.is_validated) == (size, True)


def grown(first: int, most: int, largest_that_fits: int, is_measured: bool = True) -> tuple[SizeSearch, int]:
    """A search that began with a small size of a wide range, and the number of failures up to its end."""
    search = SizeSearch(first, clean_steps=1, search_has_ended=False, most=most)
    failures = 0
    while not (search.search_has_ended and search.is_validated):
        if search.size > largest_that_fits:
            failures += 1
            assert search.record_failure(search.size)
        else:
            peak = PeakSample(search.size, largest_that_fits) if is_measured else None
            search.record_success(search.size, peak)
    return search, failures


@pytest.mark.parametrize(("largest", "found", "failures"), [(64, 62, 0), (600, 512, 0), (3, 3, 0), (2, 2, 1)])
def test_from_a_small_first_size_it_grows_to_what_fits(largest, found, failures):
    search, failed = grown(2, 512, largest)
    assert (search.size, failed) == (found, failures)


def test_without_peaks_it_tries_the_largest_and_bisects():
    search, failed = grown(2, 512, 100, is_measured=False)
    assert is_near(search.size, 100)
    assert failed <= 6


def test_how_far_it_may_grow_is_saved():
    search = SizeSearch(2, most=512)
    for largest_size, most in ((512, 512), (64, 64)):
        resumed = SizeSearch(1)
        resumed.load_state_dict(search.state_dict(), largest_size)
        assert resumed.most == most
