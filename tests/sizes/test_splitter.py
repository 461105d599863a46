"""How a fetched micro-batch is split, on one rank and on several; without a run."""

import torch

from trainapp.data.batch import MicroBatch
from trainapp.parallel.ranks import SingleRank
from trainapp.sizes.micro_batches import MicroBatchSizes
from trainapp.sizes.splitter import Splitter


class TwoRanks(SingleRank):
    """One of two ranks. The other has so many parts, and a validated size."""

    world_size = 2

    def __init__(self, parts_of_other):
        super().__init__()
        self.parts_of_other = parts_of_other
        self.votes = False

    def all_reduce_max(self, parts, is_unvalidated):
        return [max(parts, self.parts_of_other), is_unvalidated]

    def enable_votes(self, enabled):
        self.votes = enabled


def samples_of(parts):
    return [len(part) for part in parts]


def test_what_fits_stays_whole():
    assert samples_of(Splitter(8, 8, 1).parts()) == [8]
    assert samples_of(Splitter(9, 4, 1).parts()) == [4, 3, 2]  # not a single sample


def test_a_rank_makes_as_many_parts_as_the_rank_with_the_most():
    assert samples_of(Splitter(8, 4, 1).parts_on_all_ranks(TwoRanks(2), is_validated=True)) == [4, 4]
    parts = Splitter(8, 8, 1).parts_on_all_ranks(TwoRanks(3), is_validated=True)
    assert len(parts) == 3
    assert sum(samples_of(parts)) == 8


def test_votes_are_held_where_a_size_is_unvalidated():
    ranks = TwoRanks(1)
    Splitter(8, 8, 1).parts_on_all_ranks(ranks, is_validated=True)
    assert not ranks.votes
    Splitter(8, 8, 1).parts_on_all_ranks(ranks, is_validated=False)
    assert ranks.votes


def test_an_error_in_the_exchange_belongs_to_the_shape_that_is_split():
    sizes = MicroBatchSizes(8)
    sizes.begin(64, 8)
    seen = []

    class Noting(TwoRanks):
        def all_reduce_max(self, *values):
            seen.append(sizes.current.bucket)
            return super().all_reduce_max(*values)

    data = torch.zeros(8, 16)
    micro = MicroBatch(data, last=True, real=True, positions=range(8), slice_samples=lambda start, end: data[start:end])
    list(sizes.split(micro, Noting(1)))
    assert seen == [16]
