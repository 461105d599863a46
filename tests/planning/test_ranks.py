"""Which ranks are traced, how many there are, and what a simulated rank tells."""

import json
from pathlib import Path

import pytest
import runs
import torch
from helpers import run_cli

from trainapp.assembly.components import load_components
from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.parallel.ranks import SingleRank
from trainapp.planning import planner, sizes
from trainapp.planning.ranks import EqualChunks, SimulatedRanks, by_rank_zero, highest_ranks, simulated, world_of
from trainapp.torch_private import fake_tensor_mode

ROOT = Path(__file__).parents[2]
OVER = (*runs.TINY, "checkpointing=off", "plan.levers=false")


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
    assert world_of(configure("parallel=fsdp", "parallel.devices=4", "parallel.nodes=8")) == 32
    assert world_of(configure("parallel=fsdp", "parallel.devices=4", "plan.world=512")) == 512


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs says")
def test_a_number_of_ranks_that_nothing_says():
    with pytest.raises(UserError, match=r"set plan\.world=N"):
        world_of(configure("parallel=ddp"))


def test_replicas_must_divide_the_ranks():
    with pytest.raises(UserError, match=r"parallel\.fsdp\.replicas=2: must divide the number of ranks, 3"):
        world_of(configure("parallel=hsdp", "plan.world=3"))


def test_the_micro_batches_of_a_step_are_those_of_one_rank():
    config = configure("parallel=ddp", "plan.world=4", "batch.global_size=64", "batch.micro_size=8", "data.size=128")
    plans = sizes.Planner(config, load_components(config))
    plans.counts_work = True
    assert plans.at(8, 0).work.micro_batches == 2


@pytest.mark.slow
def test_five_hundred_ranks():
    base = ("parallel=fsdp", "batch.global_size=1024", "data.size=2048", "data.val_size=512", "batch.micro_size=2")
    few, many = (planner.plan(configure(*base, f"plan.world={world}"))[0] for world in (2, 512))
    assert many["certainty"] == "exact"
    assert many["ranks"]["world"] == 512
    assert many["ranks"]["binding_rank"] == 0
    # Rank 0 has a row of each parameter, or one number of a vector; most ranks have nothing.
    assert many["static"]["parameters"] < few["static"]["parameters"] / 4
    assert many["ranks"]["peak_bytes"]["511"] < many["ranks"]["peak_bytes"]["0"] == many["peak_bytes"]
    assert {"communication_buffers", "parameters"} <= set(many["kinds"])


@pytest.mark.parametrize("shape", [(12, 3), (7, 3), (2, 3), (0, 3)])
@pytest.mark.parametrize(("chunks", "dim"), [(4, 0), (3, 1), (512, 0)])
def test_equal_chunks_have_the_shapes_of_chunks(shape, chunks, dim):
    real = torch.empty(shape)
    with fake_tensor_mode() as mode, EqualChunks():
        cut = torch.chunk(mode.from_tensor(real), chunks, dim=dim)
        exact = torch.chunk(real, chunks, dim=dim)
    assert [(piece.shape, piece.stride()) for piece in cut] == [(piece.shape, piece.stride()) for piece in exact]
    assert len({id(piece) for piece in exact}) == len(exact)  # those of real tensors are what they were
    assert len({id(piece) for piece in cut}) <= 2 or not shape[dim]


def test_the_process_group_ends_with_the_trace():
    device = torch.device("cpu")
    with simulated(2, 4, device) as ranks:
        assert (ranks.rank, ranks.world, ranks.is_rank_zero) == (2, 4, False)
        assert ranks.all_gather_object("a") == ["a"] * 4
        assert torch.distributed.get_world_size() == 4
    assert not torch.distributed.is_initialized()
    with simulated(0, 1, device) as ranks:
        assert isinstance(ranks, SingleRank)


def test_rank_zero_asks_for_all():
    config, asked = configure("parallel=fsdp", "parallel.devices=2"), []
    zero = SimulatedRanks(0, 4, torch.device("cpu"))
    assert by_rank_zero(zero, config, lambda c: asked.append(c.plan.world) or 21) == 21
    assert asked == [4]
    other = SimulatedRanks(1, 4, torch.device("cpu"))
    assert by_rank_zero(other, config, lambda c: asked.append(c)) is None
    assert len(asked) == 1

    def refuses(_):
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        by_rank_zero(zero, config, refuses)


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


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])  # torch has no fake kernel of the latter
def test_a_large_shape_takes_little_memory(monkeypatch, optimizer):
    """An 8B model on 512 ranks, whose own peak is some GiB. (How long it takes depends on the machine.)"""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import plan_cost

    found = plan_cost.in_child("trace", [*plan_cost.overrides("8B", "fsdp", 512), f"optimizer={optimizer}"])
    assert found["peak_bytes"] > 4 * 2**30
    assert found["memory_bytes"] < 300 * 2**20
