"""One process and many have the same interface."""

import inspect

import pytest
import torch

from trainapp.parallel.ranks import DistributedRanks, Flags, Ranks, SingleRank


def interface(kind: type) -> dict[str, list[tuple]]:
    """The public methods and their parameters."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: [(p.name, p.kind) for p in inspect.signature(method).parameters.values()]
        for name, method in methods
        if not name.startswith("_")
    }


@pytest.mark.parametrize("kind", [SingleRank, DistributedRanks])
def test_both_offer_what_the_protocol_asks(kind):
    wanted, offered = interface(Ranks), interface(kind)
    assert len(wanted) > 10
    assert {name: offered.get(name) for name in wanted} == wanted
    assert hasattr(kind, "is_rank_zero")


def test_attributes_of_a_single_rank():
    assert all(hasattr(SingleRank, name) for name in Ranks.__annotations__)


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
