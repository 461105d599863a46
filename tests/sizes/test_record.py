"""The micro-batch that a run begins with: the precedence of all sources."""

import pytest

from trainapp.config.compose import from_command_line
from trainapp.parallel.ranks import SingleRank
from trainapp.sizes.micro_batches import Ran
from trainapp.sizes.record import initial_sizes, shape_of, shown


def known(size: int) -> dict:
    """The state left by an earlier run, a checkpoint or a restart: one shape, validated; twice the size failed."""
    return {"start": 64, "buckets": {"64": [size, size, 2 * size, True]}}


SOURCES = {
    "restart": {"micro": known(7), "eval_micro": known(9)},
    "saved": {"micro": known(11), "eval_micro": known(13)},
}
SCHEDULE = "batch.micro_schedule={1: 23, 5: 29}"


def begin(*overrides: str, sources: tuple[str, ...] = (), world: int = 1, **options):
    config = from_command_line(["batch.global_size=64", *overrides])
    return initial_sizes(config, world, 1000, **{name: SOURCES[name] for name in sources}, **options)


# In order of precedence: what is set or known, and the resulting training size.
ORDER = [
    (("restart",), (), 7),
    ((), (SCHEDULE,), 23),
    ((), ("batch.micro_size=31",), 31),
    (("saved",), (), 11),
    ((), (), 64),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
@pytest.mark.parametrize("second", range(len(ORDER)))
def test_the_first_that_is_known_decides(first, second):
    (sources, overrides, size) = ORDER[min(first, second)]
    (others, more, _) = ORDER[max(first, second)]
    sizes = begin(*{*overrides, *more}, sources=tuple({*sources, *others}))
    sizes.train.follow_schedule(1)
    assert sizes.train.size == size


@pytest.mark.parametrize(
    ("sources", "overrides", "size"),
    [
        (("restart", "saved"), ("batch.eval_micro_size=10",), 9),
        (("restart",), ("batch.eval_micro_size=5",), 5),  # a restart never exceeds the setting
        (("saved",), ("batch.eval_micro_size=5",), 5),
        (("saved",), (), 13),
        (("saved",), ("batch.micro_size=3",), 13),
        ((), (), 128),
    ],
)
def test_evaluation(sources, overrides, size):
    assert begin(*overrides, sources=sources).evaluation.size == size


def test_the_share_of_a_rank():
    assert begin(world=3).train.size == 22
    assert begin("accumulation.steps=3", world=2).train.size == 11
    assert begin("batch.micro_size=50", world=2).train.size == 32
    assert begin(world=3).evaluation.size == 44
    assert begin("batch.eval_micro_size=400", world=3).evaluation.size == 334  # all samples of one rank


@pytest.mark.parametrize(
    ("step", "by_step"),
    [
        (0, {1: 23, 4: 23, 5: 29, 9: 29}),
        (2, {3: 23, 4: 23, 5: 29}),  # resumed between two entries: the earlier one applies
        (4, {5: 29, 6: 29}),
        (7, {8: 29, 9: 29}),
    ],
)
def test_a_schedule_after_a_resume(step, by_step):
    sizes = begin(SCHEDULE, attempts=step)
    for coming in range(step + 1, 10):
        sizes.train.follow_schedule(coming)
        if coming in by_step:
            assert sizes.train.size == by_step[coming]


def test_what_failed_is_not_scheduled_again():
    sizes = begin(SCHEDULE, sources=("restart",), attempts=3)
    for coming in range(4, 8):
        sizes.train.follow_schedule(coming)
    assert sizes.train.size == 7


def test_a_restart_from_before_any_shape_was_known():
    """Memory ran out in the very first fetch: no buckets exist yet."""
    config = from_command_line(["batch.global_size=64"])
    sizes = initial_sizes(config, 1, 1000, restart={"micro": {"start": 16, "buckets": {}}})
    assert sizes.train.size == 16


@pytest.mark.parametrize("retries_in_place", [True, False])
@pytest.mark.parametrize("source", ["restart", "saved"])
def test_no_larger_size_is_tried_where_one_that_fails_costs_a_restart(source, retries_in_place):
    """The source's search has not ended: between 8, which works, and 32, which does not, lies 20."""
    search = {"start": 64, "buckets": {"64": [8, 8, 32, False]}}
    config = from_command_line(["batch.global_size=64", "oom.clean_steps=1"])
    known = {source: {"micro": search, "eval_micro": search}}
    sizes = initial_sizes(config, 1, 1000, retries_in_place=retries_in_place, **known)
    for searched in (sizes.train, sizes.evaluation):
        searched.attempt = {64: Ran(8)}
        assert searched.succeeded(SingleRank()) == ({64: 20} if retries_in_place else {})
        assert searched.search_has_ended is not retries_in_place
        searched.attempt = {64: Ran(8)}
        assert searched.has_news is retries_in_place  # otherwise the ranks would ask each other in every step


def test_a_message_says_which_shape_a_size_is_for():
    sizes = begin().train
    assert shown(sizes) == "64"
    sizes.load_state_dict({"start": 64, "buckets": {"128": [40, 40, 44, True]}})
    assert (shown(sizes), shape_of(sizes, 128)) == ("40", "")  # the only shape
    sizes.load_state_dict({"start": 64, "buckets": {"32": [40, 40, None, True], "256": [22, 22, 24, True]}})
    assert shown(sizes) == "40 for up to 128 elements per sample, 22 for up to 256 elements per sample"
    assert shape_of(sizes, 256) == " for up to 256 elements per sample"
