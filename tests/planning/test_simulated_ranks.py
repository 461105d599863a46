"""How many ranks are planned for, and what a simulated rank tells."""

import pytest
import runs
import torch

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.parallel.ranks import SingleRank
from trainapp.planning import planner
from trainapp.planning.simulated_ranks import planned_world_size, simulated

OVER = (*runs.TINY, "checkpointing=off", "plan.techniques=false")


def configure(*overrides):
    return compose.from_command_line([*OVER, *runs.MODELS["gpt"], *overrides])


def test_the_number_of_ranks():
    assert planned_world_size(configure()) == 1
    assert planned_world_size(configure("parallel=fsdp", "parallel.devices=3")) == 3
    assert planned_world_size(configure("parallel=fsdp", "parallel.devices=4", "plan.world=512")) == 512
    assert planned_world_size(configure("parallel=ddp", "parallel.devices=1")) == 1
    assert planned_world_size(configure("parallel=fsdp", "parallel.devices=1", "plan.world=2")) == 2


@pytest.mark.parametrize("given", ["plan.world=1", "parallel.devices=1"])
def test_no_plan_of_fsdp_on_one_rank(given):
    with pytest.raises(UserError, match=f"parallel=fsdp with {given}: .*; start more ranks, or use parallel=single"):
        planned_world_size(configure("parallel=fsdp", given))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs says")
def test_a_number_of_ranks_that_nothing_says():
    with pytest.raises(UserError, match=r"set plan\.world=N"):
        planned_world_size(configure("parallel=ddp"))


def test_ranks_on_the_cpu_are_not_one_per_gpu(monkeypatch):
    """A run with these settings is refused for the same reason."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert planned_world_size(configure("parallel=ddp", "train.device=auto")) == 4
    with pytest.raises(UserError, match=r"set plan\.world=N"):
        planned_world_size(configure("parallel=ddp", "train.device=cpu"))


def test_replicas_must_divide_the_ranks():
    with pytest.raises(UserError, match=r"parallel\.fsdp\.replicas=2: must divide the number of ranks, 3"):
        planner.plan(configure("parallel=hsdp", "plan.world=3"))


@pytest.mark.slow
def test_five_hundred_ranks():
    base = ("parallel=fsdp", "batch.global_size=1024", "data.size=2048", "data.val_size=512", "batch.micro_size=2")
    few, many = (planner.plan(configure(*base, f"plan.world={world}"))[0] for world in (2, 512))
    assert many["method"] == "traced"
    assert many["ranks"]["world"] == 512
    # Rank 0 has a row of each parameter, or one number of a vector.
    assert many["categories"]["parameters"] < few["categories"]["parameters"] / 4


def test_the_process_group_ends_with_the_trace():
    device = torch.device("cpu")
    with simulated(2, 4, device) as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_rank_zero) == (2, 4, False)
        assert ranks.all_gather_object("a") == ["a"] * 4
        assert torch.distributed.get_world_size() == 4
    assert not torch.distributed.is_initialized()
    with simulated(0, 1, device) as ranks:
        assert isinstance(ranks, SingleRank)
