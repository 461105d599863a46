"""Sizes from files that anything may have written: believed only where they are possible, and harmless then."""

import functools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainapp.config.compose import from_command_line
from trainapp.data.size_search import SizeSearch
from trainapp.parallel.ranks import SingleRank
from trainapp.train.initial_sizes import initial_sizes

NUMBER = st.one_of(
    st.integers(-3, 200),
    st.integers(),
    st.sampled_from([None, True, False, "", "8", [], {}, 1.0, 2.5, 1e308, 10**400, -(2**63)]),
    st.floats(),
)
BUCKET = st.one_of(
    st.sampled_from(["64", "128", "0", "1", "-64", "100", "6_4", " 64", "\u0664", "1e3", "9" * 5000, "x", ""]),
    st.sampled_from([64, 0, -64, 1.0, True, None, float("nan"), 2**70]),
)
ENTRY = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(0, 70), st.none() | st.integers(1, 140), st.booleans()).map(list),
    st.lists(NUMBER, min_size=4, max_size=4),
    st.lists(NUMBER, max_size=6),
    NUMBER,
)
SIZES = st.one_of(
    st.fixed_dictionaries({"start": NUMBER, "buckets": st.dictionaries(BUCKET, ENTRY, max_size=3) | NUMBER}),
    st.dictionaries(st.sampled_from(["start", "buckets", "x"]), NUMBER),
    NUMBER,
)
SOURCE = st.one_of(
    st.fixed_dictionaries({"micro": SIZES, "eval_micro": SIZES}),
    st.dictionaries(st.sampled_from(["micro", "eval_micro", "oom_restarts"]), SIZES | NUMBER),
    st.none(),
)


@functools.cache
def config():
    return from_command_line(["batch.global_size=64", "oom.clean_steps=1"])


@settings(max_examples=400, deadline=None)
@given(source=SOURCE, name=st.sampled_from(["hint", "saved"]), smallest=st.integers(1, 2))
# Each of these was believed: sizes that no step reaches, and which are never proven; a size that is a truth value.
@example({"micro": {"start": 64, "buckets": {"64": [60, 60, 10**30, False]}}}, "saved", 1)
@example({"micro": {"start": 64, "buckets": {"64": [60, 60, -5, False]}}}, "saved", 1)
@example({"micro": {"start": 64, "buckets": {"64": [True, True, None, True]}}}, "saved", 1)
@example({"micro": {"start": 64, "buckets": {"64": [60, -9, 64, False]}}}, "hint", 1)
@example({"micro": {"start": 64, "buckets": {"64": [1, 0, None, True]}}}, "hint", 2)
@example({"micro": {"start": 64, "buckets": {"64": [60, 0, 20, False]}}}, "hint", 1)
def test_any_source_leaves_a_search_that_ends(source, name, smallest):
    sizes = initial_sizes(config(), 1, 64, 100, smallest=smallest, **{name: source})
    sizes.continue_history(None, source if name == "hint" else None)
    assert 0 <= sizes.oom_restarts < 2**31
    for micro, most in ((sizes.train, 64), (sizes.evaluation, 100)):
        for bucket, search in micro.searches.items():
            assert type(bucket) is int
            assert bucket >= 0
            for _ in range(12):  # each size works at once: the search ends at a size that a step can reach
                assert type(search.size) is int
                assert micro.smallest <= search.size <= most
                if search.is_proven and search.search_has_ended:
                    break
                search.succeeded(search.size)
            assert search.is_proven
            assert search.search_has_ended
        micro.attempt_samples = {64: 1}
        assert micro.failed(SingleRank()) is None or micro.size >= 1


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(1, 64),
    outcomes=st.lists(st.booleans(), max_size=12),
    fits=st.integers(1, 64),
)
def test_what_a_search_leaves_behind_is_believed(start, outcomes, fits):
    """The rules refuse no state that a search can really reach."""
    sizes = initial_sizes(config(), 1, 64, 100).train
    sizes.start = start
    search = sizes.searches[64] = SizeSearch(start, 1)
    for lenient in outcomes:
        if search.size <= fits or lenient:
            search.succeeded(search.size)
        elif not search.failed(search.size):
            break
    again = initial_sizes(config(), 1, 64, 100, saved={"micro": sizes.state_dict()})
    assert again.origin == "saved"
    assert again.train.searches[64].size == search.size
