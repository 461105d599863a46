"""Which ranks are planned, how many there are, and what a simulated rank tells."""

import json

import pytest
import runs
import torch
from helpers import run_cli

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.parallel.ranks import SingleRank
from trainapp.planning import planner
from trainapp.planning.simulated_ranks import highest_ranks, simulated, world_of

OVER = (*runs.TINY, "checkpointing=off", "plan.techniques=false")


def configure(*overrides):
    return compose.from_command_line([*OVER, *runs.MODELS["gpt"], *overrides])


@pytest.mark.parametrize("world", range(2, 9))
def test_no_rank_has_both_more_samples_and_larger_shards_than_those_that_are_traced(world):
    for shards in (size for size in range(1, world + 1) if world % size == 0):
        for samples in range(1, 3 * world):
            share = [samples * (rank + 1) // world - samples * rank // world for rank in range(world)]
            traced = highest_ranks(world, shards, samples)
            assert len(traced) <= 2
            assert all(share[rank] for rank in traced)
            for rank in (rank for rank in range(world) if share[rank]):
                assert any(
                    share[other] >= share[rank] and (samples < world or other % shards <= rank % shards)
                    for other in traced
                )


def test_the_number_of_ranks():
    assert world_of(configure()) == 1
    assert world_of(configure("parallel=fsdp", "parallel.devices=3")) == 3
    assert world_of(configure("parallel=fsdp", "parallel.devices=4", "plan.world=512")) == 512


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs says")
def test_a_number_of_ranks_that_nothing_says():
    with pytest.raises(UserError, match=r"set plan\.world=N"):
        world_of(configure("parallel=ddp"))


def test_replicas_must_divide_the_ranks():
    with pytest.raises(UserError, match=r"parallel\.fsdp\.replicas=2: must divide the number of ranks, 3"):
        world_of(configure("parallel=hsdp", "plan.world=3"))


@pytest.mark.slow
def test_five_hundred_ranks():
    base = ("parallel=fsdp", "batch.global_size=1024", "data.size=2048", "data.val_size=512", "batch.micro_size=2")
    few, many = (planner.plan(configure(*base, f"plan.world={world}"))[0] for world in (2, 512))
    assert many["method"] == "traced"
    assert many["ranks"]["world"] == 512
    assert many["ranks"]["binding_rank"] == 0
    # Rank 0 has a row of each parameter, or one number of a vector; most ranks have nothing.
    assert many["categories"]["parameters"] < few["categories"]["parameters"] / 4
    assert many["ranks"]["peak_bytes"]["511"] < many["ranks"]["peak_bytes"]["0"] == many["peak_bytes"]


def test_the_process_group_ends_with_the_trace():
    device = torch.device("cpu")
    with simulated(2, 4, device) as ranks:
        assert (ranks.rank, ranks.world, ranks.is_rank_zero) == (2, 4, False)
        assert ranks.all_gather_object("a") == ["a"] * 4
        assert torch.distributed.get_world_size() == 4
    assert not torch.distributed.is_initialized()
    with simulated(0, 1, device) as ranks:
        assert isinstance(ranks, SingleRank)


@pytest.mark.slow
def test_mode_plan_says_which_rank_binds(tmp_path):
    done = run_cli(
        *OVER, *runs.MODELS["gpt"], "mode=plan", "parallel=fsdp", "plan.world=4", "data.vocab_size=29",
        "batch.micro_size=2", "hydra.run.dir=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = json.loads((tmp_path / "here/plan.json").read_text())["ranks"]
    assert (ranks["world"], ranks["strategy"], ranks["replicas"], ranks["binding_rank"]) == (4, "fsdp", 1, 0)
    assert ranks["peak_bytes"]["0"] > ranks["peak_bytes"]["3"]
    assert "4 ranks, fsdp: rank 0 is the highest (rank 3: " in done.stdout
