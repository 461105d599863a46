"""One process and many have the same interface."""

import inspect

import torch

from trainapp.parallel.ranks import DistributedRanks, Flags, Ranks, SingleRank


def test_many_ranks_inherit_no_identity():
    methods = {name for name, _ in inspect.getmembers(Ranks, inspect.isfunction) if not name.startswith("_")}
    assert methods - vars(DistributedRanks).keys() == {"collective", "exchange_in_library", "meshes"}


def test_every_collective_of_a_single_rank_is_the_identity():
    ranks = SingleRank()
    value = torch.tensor([1.0, 2.0])
    assert torch.equal(ranks.all_reduce_sum(value), value)
    assert ranks.all_reduce_min(3) == 3
    assert ranks.all_reduce_max(3, 4) == [3, 4]
    assert ranks.all_gather_object("a") == ["a"]
    assert [ranks.vote(failed) for failed in (True, False)] == [True, False]
    ranks.enable_votes(True)
    assert not ranks.votes_enabled


def test_a_signal_during_the_step_is_seen_at_its_end():
    ranks, signal = SingleRank(), []
    ranks.start_flag_exchange(lambda: Flags(stop_signal=len(signal)))
    signal.append(2)
    assert ranks.finish_flag_exchange() == Flags(stop_signal=1, still_saving=False, search_news=False)
