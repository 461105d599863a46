"""The sizes of several shapes, and agreement between ranks; without a run."""

from typing import Any

import torch

from trainapp.data.batch import MicroBatch, map_tensors
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
