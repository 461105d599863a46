"""The sizes of several shapes, and agreement between ranks; without a run."""

from typing import Any

import pytest
import torch

from trainapp.data.batch import map_tensors
from trainapp.data.forecast import Forecast
from trainapp.data.micro_batch import MicroBatch
from trainapp.data.micro_batch_sizes import MicroBatchSizes
from trainapp.data.size_agreement import failed_buckets
from trainapp.data.size_search import FailedAllocation
from trainapp.parallel.ranks import SingleRank


def batch_of(samples: int, features: int) -> torch.Tensor:
    return torch.zeros(samples, features)


def pieces(sizes: MicroBatchSizes, batch: torch.Tensor) -> list[int]:
    return [piece.samples for piece in sizes.cut(fetched(batch, len(batch)), SingleRank())]


def fetched(batch: Any, samples: int) -> MicroBatch:
    """A micro-batch whose tensors have a row per sample, except for those without dimensions."""

    def piece(start: int, end: int) -> Any:
        return map_tensors(lambda t: t[start:end] if t.ndim else t, batch)

    return MicroBatch(batch, last=True, real=True, samples=samples, piece=piece)


def test_a_new_long_shape_begins_where_the_others_experience_puts_it():
    sizes = MicroBatchSizes(64)
    assert pieces(sizes, batch_of(64, 128)) == [64]
    assert sizes.failed(SingleRank()) == (64, 32)
    # Four times the numbers per sample: a quarter of the samples.
    assert pieces(sizes, batch_of(64, 512)) == [8] * 8
    # A shorter shape does not get more than the start size.
    assert pieces(sizes, batch_of(64, 16)) == [64]


def test_a_shape_that_is_cut_unevenly_proves_its_size():
    sizes = MicroBatchSizes(64, grow=False)
    pieces(sizes, batch_of(64, 16))
    sizes.succeeded(SingleRank())
    sizes.follow({16: 64, 1024: 24})
    for _ in range(3):
        assert pieces(sizes, batch_of(64, 1024)) == [24, 24, 16]
        sizes.succeeded(SingleRank())
    assert sizes.searches[1024].is_proven
    assert pieces(sizes, batch_of(49, 1024)) == [24, 23, 2]  # BatchNorm cannot normalise a single sample


def test_only_the_bucket_at_work_fails():
    sizes = MicroBatchSizes(64)
    assert pieces(sizes, batch_of(64, 16)) == [64]
    assert pieces(sizes, batch_of(64, 1024)) == [64]
    sizes.succeeded(SingleRank())
    pieces(sizes, batch_of(64, 1024))
    assert sizes.failed(SingleRank()) == (64, 32)
    assert {bucket: search.size for bucket, search in sizes.searches.items()} == {16: 64, 1024: 32}


def test_the_largest_micro_batch_of_the_attempt_is_what_failed():
    sizes = MicroBatchSizes(64)
    assert pieces(sizes, batch_of(40, 16)) == [40]
    sizes.succeeded(SingleRank())
    assert pieces(sizes, batch_of(20, 16)) == [20]
    assert pieces(sizes, batch_of(10, 16)) == [10]
    assert sizes.failed(SingleRank()) == (20, 10)
    assert sizes.searches[16].fails == 20


class ThreeRanks(SingleRank):
    """The second of three ranks, with given messages from the others."""

    rank, world = 1, 3

    def __init__(self, first, third):
        self.first, self.third = first, third

    def all_gather_object(self, value):
        return [self.first, value, self.third]


def test_ranks_agree_on_what_ran_and_on_who_failed():
    first_failure, third_failure = (
        FailedAllocation(("forward", ""), 10, 20, 30),
        FailedAllocation(("forward", ""), 11, 20, 30),
    )
    first, third = ({16: 30}, 16, first_failure), ({16: 31, 1024: 7}, 1024, third_failure)
    largest, failures = failed_buckets(ThreeRanks(first, third), {16: 32}, None, None)
    assert largest == {16: 32, 1024: 7}
    assert failures == {16: first_failure, 1024: third_failure}
    sizes = MicroBatchSizes(64)
    sizes.attempt_samples = {16: 32}
    assert sizes.failed(ThreeRanks(first, third), culprit=False) == (32, 16)
    assert {bucket: (s.size, s.fails) for bucket, s in sizes.searches.items()} == {16: (16, 32), 1024: (3, 7)}


def test_what_is_proven_for_a_larger_shape_is_proven_for_a_smaller():
    sizes = MicroBatchSizes(64)
    for _ in range(3):
        assert sizes.is_unproven
        pieces(sizes, batch_of(64, 1024))
        sizes.succeeded(SingleRank())
    pieces(sizes, batch_of(64, 16))
    sizes.succeeded(SingleRank())
    assert sizes.all_proven
    assert not sizes.is_unproven
    pieces(sizes, batch_of(64, 4096))
    assert sizes.needs_watching
    sizes.succeeded(SingleRank())
    assert sizes.is_unproven


def test_a_rare_long_shape_leaves_the_others_in_peace():
    sizes = MicroBatchSizes(64)
    for features in (16, 16, 16, 1024, 16):
        pieces(sizes, batch_of(64, features))
        sizes.succeeded(SingleRank())
    assert not sizes.all_proven  # the long shape ran once
    assert not sizes.is_unproven  # but is not in use


def test_sizes_survive_a_checkpoint():
    sizes = MicroBatchSizes(64)
    pieces(sizes, batch_of(64, 16))
    sizes.succeeded(SingleRank())
    pieces(sizes, batch_of(64, 1024))
    sizes.failed(SingleRank())
    loaded = MicroBatchSizes(64)
    loaded.load_state_dict(sizes.state_dict())
    assert {bucket: search.size for bucket, search in loaded.searches.items()} == {16: 64, 1024: 32}
    assert loaded.searches[1024].fails == 64
    assert not loaded.all_proven  # only a hint: it must still be proven


def test_what_is_cut_again_loses_nothing():
    sizes = MicroBatchSizes(64)
    batch = {"inputs": torch.arange(30).reshape(10, 3), "targets": torch.arange(10), "scale": torch.tensor(2.0)}
    micro = fetched(batch, 10)
    list(sizes.cut(micro, SingleRank()))
    sizes.follow(4)
    cut = [piece.data for piece in sizes.cut(micro, SingleRank())]
    assert [len(piece["targets"]) for piece in cut] == [4, 4, 2]
    assert torch.equal(torch.cat([piece["inputs"] for piece in cut]), batch["inputs"])
    assert all(piece["scale"] == 2.0 for piece in cut)


LINEAR = {1: 140, 21: 940, 22: 980, 64: 2660}  # 100 bytes, and 40 per sample, of 970


def forecast_of(size=21, peaks=LINEAR, least=940):
    return Forecast(size=size, peaks=peaks, least=least, fixed=100, limit=970)


def failed_at_64(forecast: Forecast | None, size: int = 21, grow: bool = True) -> MicroBatchSizes:
    """After a failure at 64, with a plan for `size`."""
    sizes = MicroBatchSizes(64, grow=grow)
    pieces(sizes, batch_of(64, 16))
    assert sizes.failed(SingleRank()) == (64, 32)
    sizes.expect(16, size, forecast)
    return sizes


def next_size(sizes: MicroBatchSizes, *measured: int | None) -> int:
    """After clean steps of which these peaks were measured."""
    for peak in measured:
        pieces(sizes, batch_of(64, 16))
        sizes.compare(SingleRank(), peak)
        sizes.succeeded(SingleRank())
    return sizes.size


def test_a_planned_size_ends_the_search():
    sizes = MicroBatchSizes(64)
    assert not sizes.expect(16, 21)  # nothing has failed
    pieces(sizes, batch_of(64, 16))
    assert sizes.failed(SingleRank()) == (64, 32)
    assert not sizes.expect(16, 64)  # it is known to fail
    assert not sizes.expect(16, 0)
    assert (sizes.size, sizes.search_has_ended) == (32, False)
    assert sizes.expect(16, 21, forecast_of())
    for _ in range(3):
        assert pieces(sizes, batch_of(64, 16)) == [21, 21, 20, 2]  # BatchNorm cannot normalise a single sample
        sizes.compare(SingleRank(), 930)
        assert sizes.succeeded(SingleRank()) == {}
    assert (sizes.size, sizes.search_has_ended) == (21, True)


def test_the_search_goes_on_where_steps_need_much_less_than_planned():
    # 20 bytes per sample rather than 40: 42 of them fit 98% of 970 bytes.
    assert next_size(failed_at_64(forecast_of()), 520, 520, 520) == 42
    # The first step of an optimizer that creates its state late needs less than the others.
    assert next_size(failed_at_64(forecast_of()), 520, 940, 520) == 21
    assert next_size(failed_at_64(forecast_of()), None, None, None) == 21  # not measured
    assert next_size(failed_at_64(forecast_of(), grow=False), 520, 520, 520) == 21
    assert next_size(failed_at_64(None), 520, 520, 520) == 21
    # A plan that is a range: as low as that it may be.
    assert next_size(failed_at_64(forecast_of(least=500)), 520, 520, 520) == 21


def test_a_size_that_disproves_the_plan_ends_the_search_once_it_is_proven():
    sizes = failed_at_64(forecast_of())
    assert next_size(sizes, 520, 520, 520) == 42
    assert next_size(sizes, 940, 940, 940) == 42
    assert sizes.search_has_ended


@pytest.mark.parametrize("clean_steps", [0, 2, 10])
def test_a_corrected_size_that_fails_ends_the_search(clean_steps):
    """A third error would not be worth what is left to gain, however long it took."""
    sizes = failed_at_64(forecast_of())
    assert next_size(sizes, 520, 520, 520) == 42
    assert next_size(sizes, *[940] * clean_steps) == 42
    pieces(sizes, batch_of(64, 16))
    assert sizes.failed(SingleRank()) == (42, 21)
    assert next_size(sizes, 520, 520, 520) == 21
    assert sizes.search_has_ended


def test_a_planned_size_that_fails_is_halved_and_the_plan_corrected():
    """By what the half needs: 60 bytes per sample rather than 40, so that 14 of them fit."""
    sizes = failed_at_64(forecast_of())
    pieces(sizes, batch_of(64, 16))
    assert sizes.failed(SingleRank()) == (21, 10)
    assert next_size(sizes, 700, 700, 700) == 14
    assert next_size(sizes, 940, 940, 940) == 14
    assert sizes.search_has_ended


def test_a_planned_size_that_is_known_to_fail_is_halved_and_the_plan_corrected():
    sizes = failed_at_64(forecast_of(64, {64: 960}), 64)
    assert next_size(sizes, 660, 660, 660) == 48  # 17.5 bytes per sample


def test_ranks_decide_by_the_highest_peak_of_all():
    class Two(SingleRank):
        world = 2

        def all_gather_object(self, value):
            return [value, 940 if isinstance(value, int) else value]

    sizes = failed_at_64(forecast_of())
    for _ in range(3):
        pieces(sizes, batch_of(64, 16))
        sizes.compare(Two(), 520)
        sizes.succeeded(SingleRank())
    assert sizes.size == 21


def test_a_forecast_lies_on_lines_through_what_was_traced():
    forecast = forecast_of()
    assert [forecast.peak(size) for size in (1, 11, 21, 43, 64)] == [140, 540, 940, 1820, 2660]
    assert forecast_of(peaks={64: 2660}).peak(32) == 1380  # from what persists without any sample
    assert forecast_of(peaks={21: 940}).peak(42) == 1780
