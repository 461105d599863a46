"""The sizes of several shapes, and agreement between ranks; without a run."""

from typing import Any

import torch

from trainapp.data.batch import MicroBatch, map_tensors
from trainapp.parallel.ranks import SingleRank
from trainapp.sizes.failures import OUT_OF_MEMORY, AttemptFailure, ErrorKind, SizeChange
from trainapp.sizes.micro_batches import LargestMicroBatch, MicroBatchSizes, RankReport, ShapeHistory
from trainapp.sizes.record import shape_suffix, sizes_text
from trainapp.sizes.schedule import SizeSchedule
from trainapp.sizes.search import FailedAllocation, PeakSample, SizeSearch


def batch_of(samples: int, features: int) -> torch.Tensor:
    return torch.zeros(samples, features)


def samples_of_each(sizes: MicroBatchSizes, batch: torch.Tensor) -> list[int]:
    return [micro.samples for micro in sizes.split(fetched(batch, len(batch)), SingleRank())]


def fetched(batch: Any, samples: int) -> MicroBatch:
    """A micro-batch whose tensors have a row per sample, except for those without dimensions."""

    def slice_samples(start: int, end: int) -> Any:
        return map_tensors(lambda t: t[start:end] if t.ndim else t, batch)

    return MicroBatch(batch, last=True, real=True, positions=range(samples), slice_samples=slice_samples)


def test_a_new_long_shape_begins_where_the_others_experience_puts_it():
    sizes = MicroBatchSizes(64)
    assert samples_of_each(sizes, batch_of(64, 128)) == [64]
    assert sizes.record_failure(SingleRank()) == SizeChange(old=64, new=32)
    # Four times the numbers per sample: a quarter of the samples.
    assert samples_of_each(sizes, batch_of(64, 512)) == [8] * 8
    # A shorter shape does not get more than the start size.
    assert samples_of_each(sizes, batch_of(64, 16)) == [64]


def test_a_shape_that_is_split_unevenly_proves_its_size():
    sizes = MicroBatchSizes(64, grow=False)
    samples_of_each(sizes, batch_of(64, 16))
    sizes.record_success(SingleRank())
    sizes.set_sizes({16: 64, 1024: 24})
    for _ in range(3):
        assert samples_of_each(sizes, batch_of(64, 1024)) == [24, 24, 16]
        sizes.record_success(SingleRank())
    assert sizes.searches[1024].is_validated
    assert samples_of_each(sizes, batch_of(49, 1024)) == [24, 23, 2]  # BatchNorm cannot normalise a single sample


def test_only_the_bucket_at_work_fails():
    sizes = MicroBatchSizes(64)
    assert samples_of_each(sizes, batch_of(64, 16)) == [64]
    assert samples_of_each(sizes, batch_of(64, 1024)) == [64]
    sizes.record_success(SingleRank())
    samples_of_each(sizes, batch_of(64, 1024))
    assert sizes.record_failure(SingleRank()) == SizeChange(old=64, new=32)
    assert {bucket: search.size for bucket, search in sizes.searches.items()} == {16: 64, 1024: 32}


def test_the_largest_micro_batch_of_the_attempt_is_what_failed():
    sizes = MicroBatchSizes(64)
    assert samples_of_each(sizes, batch_of(40, 16)) == [40]
    sizes.record_success(SingleRank())
    assert samples_of_each(sizes, batch_of(20, 16)) == [20]
    assert samples_of_each(sizes, batch_of(10, 16)) == [10]
    assert sizes.record_failure(SingleRank()) == SizeChange(old=20, new=10)
    assert sizes.searches[16].smallest_excluded == 20


class ThreeRanks(SingleRank):
    """The second of three ranks, with given messages from the others."""

    rank, world_size = 1, 3

    def __init__(self, first, third):
        self.first, self.third = first, third

    def all_gather_object(self, value):
        return [self.first, value, self.third]


def test_ranks_agree_on_what_ran_and_on_who_failed():
    first = RankReport({16: LargestMicroBatch(30)}, 16, OUT_OF_MEMORY)
    third = RankReport({16: LargestMicroBatch(31), 1024: LargestMicroBatch(7)}, 1024, OUT_OF_MEMORY)
    sizes = MicroBatchSizes(64)
    sizes.history[16] = ShapeHistory(LargestMicroBatch(32))
    assert sizes.record_failure(ThreeRanks(first, third), failed_here=False) == SizeChange(old=32, new=16)
    bounds = {bucket: (search.size, search.smallest_excluded) for bucket, search in sizes.searches.items()}
    assert bounds == {16: (16, 32), 1024: (3, 7)}


def test_ranks_decide_by_the_most_that_is_needed_and_the_least_headroom():
    first = {16: LargestMicroBatch(32, 0, PeakSample(500, 900))}
    third = {16: LargestMicroBatch(32, 0, PeakSample(400, 800)), 1024: LargestMicroBatch(7)}
    sizes = MicroBatchSizes(64, clean_steps=1)
    sizes.history[16] = ShapeHistory(LargestMicroBatch(64))
    sizes.begin(16, 0)
    sizes.record_failure(SingleRank())
    sizes.history[16] = ShapeHistory(LargestMicroBatch(20))  # fewer samples than the others
    assert sizes.record_success(ThreeRanks(first, third)) == {16: 50}  # 32 * 800 / 500, less 2%
    assert sizes.schedule.in_force == {16: 32, 1024: 7}  # a shape that only another rank has met, too


def test_only_full_micro_batches_are_measured():
    sizes = MicroBatchSizes(64, clean_steps=1)
    assert samples_of_each(sizes, batch_of(64, 16)) == [64]
    sizes.record_failure(SingleRank())
    assert samples_of_each(sizes, batch_of(50, 16)) == [32, 18]
    sizes.record_peak(18, resident=100, peak=200, limit=1100)
    sizes.record_peak(32, resident=100, peak=600, limit=1100)
    assert sizes.record_success(SingleRank()) == {16: 62}  # 64, less 2%


def test_what_is_proven_for_a_larger_shape_is_proven_for_a_smaller():
    sizes = MicroBatchSizes(64)
    for _ in range(3):
        assert sizes.is_unvalidated
        samples_of_each(sizes, batch_of(64, 1024))
        sizes.record_success(SingleRank())
    samples_of_each(sizes, batch_of(64, 16))
    sizes.record_success(SingleRank())
    assert not sizes.is_unvalidated
    samples_of_each(sizes, batch_of(64, 4096))
    assert sizes.needs_watching
    sizes.record_success(SingleRank())
    assert sizes.is_unvalidated


def test_a_rare_long_shape_leaves_the_others_in_peace():
    sizes = MicroBatchSizes(64)
    for features in (16, 16, 16, 1024, 16):
        samples_of_each(sizes, batch_of(64, features))
        sizes.record_success(SingleRank())
    assert not sizes.is_validated(1024)  # the long shape ran once
    assert not sizes.is_unvalidated  # but is not in use


def test_sizes_survive_a_checkpoint():
    sizes = MicroBatchSizes(64)
    samples_of_each(sizes, batch_of(64, 16))
    sizes.record_success(SingleRank())
    samples_of_each(sizes, batch_of(64, 1024))
    sizes.record_failure(SingleRank())
    loaded = MicroBatchSizes(64)
    loaded.load_state_dict(sizes.state_dict())
    assert {bucket: search.size for bucket, search in loaded.searches.items()} == {16: 64, 1024: 32}
    assert loaded.searches[1024].smallest_excluded == 64
    assert not loaded.is_validated(16)  # it must still be validated


def test_what_is_split_again_loses_nothing():
    sizes = MicroBatchSizes(64)
    batch = {"inputs": torch.arange(30).reshape(10, 3), "targets": torch.arange(10), "scale": torch.tensor(2.0)}
    micro = fetched(batch, 10)
    list(sizes.split(micro, SingleRank()))
    sizes.set_sizes(4)
    parts = [micro_batch.data for micro_batch in sizes.split(micro, SingleRank())]
    assert [len(part["targets"]) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([part["inputs"] for part in parts]), batch["inputs"])
    assert all(part["scale"] == 2.0 for part in parts)


TOO_FEW = AttemptFailure(ErrorKind.TOO_FEW_SAMPLES, samples=1)


def test_what_the_model_cannot_run_is_not_split_off_again():
    """A remainder of one: the size stays, as a replay has it, and the step is split in another way."""
    sizes = MicroBatchSizes(2)
    assert samples_of_each(sizes, batch_of(7, 16)) == [2, 2, 2, 1]
    assert sizes.may_have_too_few
    assert sizes.record_failure(SingleRank(), failure=TOO_FEW) == SizeChange(old=2, new=2, fewest_samples=2)
    assert samples_of_each(sizes, batch_of(7, 16)) == [3, 2, 2]
    assert sizes.record_success(SingleRank()) == {}
    assert sizes.schedule.in_force == {16: 2}
    assert samples_of_each(sizes, batch_of(8, 16)) == [2, 2, 2, 2]
    assert samples_of_each(sizes, batch_of(7, 1024)) == [2, 2, 2, 1]  # another shape may allow it
    assert samples_of_each(sizes, batch_of(1, 16)) == [1]  # nothing to join it with
    assert not sizes.may_have_too_few


def test_what_the_model_cannot_run_ends_the_way_down():
    sizes = MicroBatchSizes(8)
    for ran in (8, 4):
        assert samples_of_each(sizes, batch_of(8, 16))[0] == ran
        sizes.record_failure(SingleRank())
    assert samples_of_each(sizes, batch_of(8, 16))[0] == 1
    assert sizes.may_have_too_few
    assert sizes.record_failure(SingleRank(), failure=TOO_FEW) == SizeChange(old=1, new=2, fewest_samples=2)
    assert samples_of_each(sizes, batch_of(8, 16)) == [2, 2, 2, 2]
    assert sizes.record_failure(SingleRank()) is None  # for want of memory


def test_an_error_with_a_number_of_samples_that_has_run_is_not_for_too_few():
    sizes = MicroBatchSizes(8)
    samples_of_each(sizes, batch_of(12, 16))  # 8 and 4
    sizes.record_success(SingleRank())
    samples_of_each(sizes, batch_of(12, 16))
    assert sizes.current.samples == 4
    assert not sizes.may_have_too_few
    samples_of_each(sizes, batch_of(11, 16))
    assert sizes.current.samples == 3
    assert sizes.may_have_too_few


def test_ranks_agree_on_what_is_too_few():
    first = RankReport({16: LargestMicroBatch(4)}, 0, None)
    third = RankReport({16: LargestMicroBatch(4)}, 16, AttemptFailure(ErrorKind.TOO_FEW_SAMPLES, samples=2))
    sizes = MicroBatchSizes(4)
    sizes.history[16] = ShapeHistory(LargestMicroBatch(4))
    assert sizes.record_failure(ThreeRanks(first, third), failed_here=False) == SizeChange(
        old=4, new=4, fewest_samples=3
    )
    assert (sizes.searches[16].smallest, sizes.searches[16].size, sizes.fewest_samples) == (3, 4, 3)


def test_what_is_fixed_on_one_rank_ends_it_on_all():
    fixed = AttemptFailure(allocation=FailedAllocation("data", 0, 0, 100, 950, 1000, is_size_independent=True))
    sizes = MicroBatchSizes(64)
    sizes.history[16] = ShapeHistory(LargestMicroBatch(64))
    assert (
        sizes.record_failure(ThreeRanks(RankReport({}, 0, None), RankReport({}, 16, fixed)), failed_here=False) is None
    )
    assert sizes.searches == {}


def test_too_few_and_the_last_demand_survive_a_checkpoint():
    sizes = MicroBatchSizes(8)
    samples_of_each(sizes, batch_of(8, 16))
    demand = FailedAllocation("commit ", 8, 128, 100, 950, 1000)
    sizes.record_failure(SingleRank(), failure=AttemptFailure(allocation=demand))
    samples_of_each(sizes, batch_of(9, 16))
    sizes.stored_or_new_search(16).require_more_than(2)
    sizes.stored_or_new_search(16).last_failure = demand
    loaded = MicroBatchSizes(8)
    loaded.load_state_dict(sizes.state_dict())
    assert loaded.searches[16].smallest == 3
    assert loaded.searches[16].last_failure == demand
    old = MicroBatchSizes(8)
    old.load_state_dict({"start": 8, "buckets": {"16": [4, 4, 8, True]}})
    assert old.searches[16].smallest == 1


def test_a_shape_that_was_only_asked_for_is_not_stored():
    """Ranks compare and save the stored searches: a rank that has looked at one more would differ from the others."""
    sizes = MicroBatchSizes(64)
    samples_of_each(sizes, batch_of(64, 16))
    assert sizes.stored_or_new_search(1024).size == 64
    assert sizes.searches == {}
    sizes.record_success(SingleRank())
    assert list(sizes.searches) == [16]
    assert sizes.stored_or_new_search(16) is sizes.searches[16]


def test_a_message_says_which_shape_a_size_is_for():
    sizes = MicroBatchSizes(64)
    assert sizes_text(sizes) == "64"
    sizes.load_state_dict({"start": 64, "buckets": {"128": [40, 40, 44, True]}})
    assert (sizes_text(sizes), shape_suffix(sizes, 128)) == ("40", "")  # the only shape
    sizes.load_state_dict({"start": 64, "buckets": {"32": [40, 40, None, True], "256": [22, 22, 24, True]}})
    assert sizes_text(sizes) == "40 for up to 128 elements per sample, 22 for up to 256 elements per sample"
    assert shape_suffix(sizes, 256) == " for up to 256 elements per sample"


def test_a_larger_size_that_one_rank_refuses_is_left_by_all():
    sizes = MicroBatchSizes(64)
    sizes.searches[16] = SizeSearch(21, largest_validated=16, smallest_excluded=32, search_has_ended=False)
    sizes.begin(16, 0)
    assert sizes.tries_larger_size
    first = RankReport({16: LargestMicroBatch(21)}, 0, None)
    third = RankReport({16: LargestMicroBatch(21)}, 16, AttemptFailure(ErrorKind.SIZE_REJECTED))
    assert sizes.record_failure(ThreeRanks(first, third), failed_here=False) == SizeChange(old=21, new=16)
    search = sizes.searches[16]
    assert (search.size, search.smallest_excluded, search.search_has_ended) == (16, 32, True)
    assert not sizes.tries_larger_size


def test_the_schedule_of_an_update_that_is_not_in_each_step_is_followed():
    """On the old code an entry was skipped unless the update was in its very step."""
    sizes = MicroBatchSizes(64, schedule=SizeSchedule({1: 32, 4: 16, 5: 8, 20: 4}))
    sizes.apply_schedule(1)
    assert samples_of_each(sizes, batch_of(64, 16)) == [32, 32]
    sizes.apply_schedule(6)
    assert samples_of_each(sizes, batch_of(16, 16)) == [8, 8]
    sizes.set_sizes(2)  # as after an out-of-memory error
    sizes.apply_schedule(11)
    assert samples_of_each(sizes, batch_of(4, 16)) == [2, 2]
    assert sizes.schedule.coming == {20: 4}
