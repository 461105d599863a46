"""When a step contradicts the plan that a run's sizes follow."""

import pytest

from trainapp.data.forecast import Deviation, Forecast, Promise
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.data.promise import deviation
from trainapp.parallel.ranks import SingleRank

PEAKS = {1: 140, 21: 940, 64: 2660}


def forecast_of(size=21, most=940, slack=0.0, is_exact=True, promised=True):
    promise = Promise("batch.micro_size=plan", "exact", most, slack, is_exact) if promised else None
    return Forecast(size=size, peaks=PEAKS, least=most, fixed=100, limit=970, promise=promise)


@pytest.mark.parametrize(
    ("size", "ran", "measured", "typical", "planned"),
    [
        (21, 21, 940, True, None),
        (21, 21, 941, True, 940),
        (21, 21, 941, False, 940),  # too much is too much in any step
        (21, 21, 939, True, 940),
        (21, 21, 939, False, None),  # a step that is not logged, or the first
        (21, 16, 939, True, None),  # cut evenly: less than planned
        (21, 16, 941, True, 940),
        (1, 1, 141, True, 140),  # another traced size
        (1, 1, 139, True, None),
        (10, 10, 9999, True, None),  # on a line between traced ones
        (42, 42, 9999, True, None),
        (64, 64, 2661, True, 2660),
        (21, 22, 9999, True, None),  # a shape that was left whole
        (21, 0, 941, True, None),
    ],
)
def test_a_step_is_compared_with_the_plan_of_its_own_size(size, ran, measured, typical, planned):
    found = forecast_of().deviation(size, ran, measured, typical)
    assert found == (None if planned is None else Deviation(ran, planned, measured))


def test_how_far_off_depends_on_how_sure_the_plan_is():
    probed = forecast_of(slack=0.03)
    assert [probed.deviation(21, 21, peak, True) is None for peak in (911, 912, 968, 969)] == [False, True, True, False]
    either = forecast_of(is_exact=False)  # the high end of a range
    assert [either.deviation(21, 21, peak, True) is None for peak in (1, 940, 941)] == [True, True, False]
    assert forecast_of(promised=False).deviation(21, 21, 9999, True) is None  # of another shape


class Ranks(SingleRank):
    """Others have what `others` says."""

    def __init__(self, *others):
        self.others = others

    def all_gather_object(self, value):
        return [value, *self.others]


def sizes_after(samples, bucket=16, forecast=None):
    sizes = MicroBatchSizes(21)
    sizes.forecast = bucket, forecast or forecast_of()
    sizes.attempt_samples = dict(samples)
    return sizes


def test_without_a_plan_nothing_is_exchanged():
    assert deviation(MicroBatchSizes(21), None, 9999, True) is None


def test_the_highest_peak_of_all_ranks_counts():
    sizes = sizes_after({16: 21})
    assert deviation(sizes, Ranks((900, {16: 21})), 940, True) is None
    assert deviation(sizes, Ranks((941, {16: 21})), None, True) == Deviation(21, 940, 941)
    assert deviation(sizes, Ranks((0, {16: 21})), None, True) is None  # not watched on any
    assert deviation(sizes_after({}), Ranks((941, {16: 21})), 900, True) == Deviation(21, 940, 941)


def test_longer_samples_than_the_plans_say_nothing_and_shorter_ones_need_no_more():
    assert deviation(sizes_after({16: 21, 32: 21}), Ranks(), 9999, True) is None
    assert deviation(sizes_after({8: 21}), Ranks(), 9999, True) is None
    assert deviation(sizes_after({8: 21, 16: 21}), Ranks(), 941, True) == Deviation(21, 940, 941)


def test_a_plan_of_data_that_are_all_alike_is_of_the_first_shape():
    sizes = sizes_after({16: 21}, bucket=None)
    assert deviation(sizes, Ranks(), 940, True) is None
    assert sizes.forecast[0] == 16
    sizes = sizes_after({}, bucket=None)
    assert deviation(sizes, Ranks(), 940, True) is None  # nothing has been cut
    assert sizes.forecast[0] is None


def test_the_forecast_follows_what_was_measured():
    """After an error, the next size is that which fits by what a step has needed, not by what it needs again."""
    sizes = sizes_after({16: 21})
    assert deviation(sizes, Ranks(), 965, True) is not None
    forecast = sizes.forecast[1]
    assert forecast.measured == {21: 965}
    assert forecast.next_size(21, 940, 64) is None
    assert forecast.next_size(10, 520, 21) == 20
