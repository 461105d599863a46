"""Plans of several ranks for CUDA devices that are not here, from the command line and from Python."""

import json

import pytest
import runs
import torch
from helpers import run_cli

import trainapp
from trainapp.config.schema import Fsdp, Parallel
from trainapp.errors import UserError
from trainapp.models.gpt import GPT
from trainapp.parallel.fsdp import FSDP
from trainapp.planning.cuda.allocations import Allocations
from trainapp.planning.cuda.devices import COMMUNICATOR, CONTEXT, MIB, communicators_of, find
from trainapp.planning.cuda.pretend import can_pretend
from trainapp.planning.ranks import SimulatedRanks, simulated

needs_cuda = pytest.mark.skipif(not can_pretend(), reason="fake CUDA needs Linux on x86-64 or aarch64")
DEVICE = "plan.device=h100-80gb"
NO_LEVERS = "plan.levers=false"
SMALL = (
    *runs.MODELS["gpt"], "model.width=256", "model.depth=4", "model.context_length=64", "batch.global_size=32",
    "batch.micro_size=4", "every.eval=null",
)  # fmt: skip
SHARDED = ("parallel=fsdp", "plan.world=4", "parallel.fsdp.meta_init=true")


def plan(*overrides):
    facts = trainapp.plan([*SMALL, *overrides, NO_LEVERS])
    assert "reserved_bytes" in facts, facts.get("reason")
    return facts


@pytest.mark.slow
@needs_cuda
def test_the_command_line_plans_five_hundred_ranks_on_a_device_that_is_not_here(tmp_path):
    done = run_cli(
        *runs.MODELS["gpt"], "mode=plan", "parallel=fsdp", "plan.world=512", DEVICE, NO_LEVERS, "data.size=2048",
        "data.val_size=512", "batch.global_size=1024", "batch.micro_size=2", "hydra.run.dir=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "here/plan.json").read_text())
    assert facts["certainty"] == "range"
    assert facts["range_bytes"] == [int(0.75 * facts["peak_bytes"]), pytest.approx(1.1 * facts["peak_bytes"], abs=1)]
    assert facts["limit_bytes"] == find("h100-80gb").cap - 2 * COMMUNICATOR
    assert facts["device"]["nccl_bytes"] == 2 * COMMUNICATOR
    ranks = facts["ranks"]
    assert (ranks["world"], ranks["strategy"], ranks["binding_rank"]) == (512, "fsdp", 0)
    assert set(ranks["peak_bytes"]) == set(ranks["reserved_bytes"]) == {"0", "511"}
    assert ranks["peak_bytes"]["511"] <= ranks["peak_bytes"]["0"] == facts["allocated_bytes"]
    assert ranks["reserved_bytes"]["0"] == facts["reserved_bytes"] >= facts["allocated_bytes"]
    assert facts["peak_bytes"] == sum(facts["kinds"].values()) == max(facts["phases"].values())
    assert "no run on several GPUs has confirmed such a plan" in done.stdout
    assert "NCCL" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("batch.micro_size=2")


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize(
    "parallel",
    [
        ("parallel=ddp",),
        ("parallel=fsdp",),
        ("parallel=fsdp", "precision=bf16", "parallel.fsdp.reshard_after_forward=false"),
        ("parallel=fsdp", "precision=bf16_pure", "optimizer=adamw_bf16", "activation_checkpointing=full"),
        ("parallel=fsdp", "precision=fp16", "parallel.fsdp.prefetch=2", "parallel.fsdp.sync_every_micro_batch=false"),
        ("parallel=hsdp", "train.ema=0.99"),
    ],
    ids=lambda parallel: " ".join(parallel),
)
def test_a_rank_keeps_on_the_device_what_it_keeps_on_the_cpu(parallel):
    """A micro-batch of 4 of its 8 samples. Between steps; within them the kernels differ."""
    here = trainapp.plan([*SMALL, *parallel, "plan.world=4", "train.device=cpu", NO_LEVERS])
    there = plan(*parallel, "plan.world=4", DEVICE)
    assert there["certainty"] == here["certainty"].replace("exact", "range")
    assert there["static"] == here["static"]
    assert there["ranks"]["world"] == 4
    assert there["ranks"]["replicas"] == here["ranks"]["replicas"]
    assert there["kinds"]["communication_buffers"] > 0
    assert there["device"]["nccl_bytes"] == COMMUNICATOR * (
        1 if "ddp" in parallel[0] else 2 if "fsdp" in parallel[0] else 3
    )


@pytest.mark.slow
@needs_cuda
def test_what_is_sharded_is_smaller_and_what_is_gathered_is_not():
    """Four ranks have a quarter of the weights each. What stays gathered between forward and backward costs it all."""
    ddp, fsdp, kept, offloaded = (
        plan(*settings, DEVICE)
        for settings in (
            ("parallel=ddp", "plan.world=4"),
            SHARDED,
            (*SHARDED, "parallel.fsdp.reshard_after_forward=false"),
            (*SHARDED, "parallel.fsdp.cpu_offload=true"),
        )
    )
    whole = ddp["static"]["parameters"]
    assert fsdp["static"]["parameters"] == pytest.approx(whole / 4, rel=0.01)
    # Gradients, which are DDP's buckets, and two moments.
    assert ddp["allocated_bytes"] - fsdp["allocated_bytes"] > 2 * whole
    assert kept["allocated_bytes"] > fsdp["allocated_bytes"] + 0.2 * whole
    assert "optimizer_state" not in offloaded["kinds"]
    assert offloaded["allocated_bytes"] < fsdp["allocated_bytes"] - 0.5 * fsdp["static"]["optimizer_state"]


@pytest.mark.slow
@needs_cuda
def test_a_model_that_is_built_whole_counts_until_it_is_sharded():
    wide = ("model.depth=16", "model.width=512", "plan.world=64", "batch.global_size=64", "batch.micro_size=1", DEVICE)
    whole, shards = (plan("parallel=fsdp", f"parallel.fsdp.meta_init={meta}", *wide) for meta in ("false", "true"))
    parameters = 64 * shards["static"]["parameters"]
    assert whole["binding_phase"] == "building"
    assert parameters < whole["allocated_bytes"] < 1.1 * parameters
    assert whole["kinds"] == {"parameters": whole["allocated_bytes"]}
    assert max(whole["phases"], key=whole["phases"].get) == "building"
    assert whole["reserved_bytes"] >= whole["allocated_bytes"]
    assert any("parallel.fsdp.meta_init=true" in note for note in whole["notes"])
    assert "building" not in shards["phases"]
    assert shards["reserved_bytes"] < whole["reserved_bytes"]
    assert not any("meta_init" in note for note in shards["notes"])
    pure = plan("parallel=fsdp", "precision=bf16_pure", "optimizer=adamw_bf16", *wide)
    assert pure["allocated_bytes"] == pytest.approx(whole["allocated_bytes"], rel=0.05)  # in fp32 before it is cast


@pytest.mark.slow
@needs_cuda
def test_the_largest_size_of_several_ranks_has_a_tenth_to_spare():
    base = (*SHARDED, DEVICE, "batch.global_size=256", "data.size=512", "model.context_length=128")

    def reserved(size):
        return plan(*base, f"batch.micro_size={size}")["reserved_bytes"]

    limit = int(1.1 * (reserved(4) + reserved(64)) / 2)
    largest = plan(*base, f"memory.limit={limit}")["largest_micro_size"]
    assert 4 < largest < 64
    assert limit / 1.1 < reserved(largest + 1) < limit  # it would fit, if the plan is right


@pytest.mark.slow
@needs_cuda
def test_levers_of_several_ranks_have_the_peaks_of_their_own_plans():
    base = (*SMALL, "parallel=ddp", "plan.world=4", DEVICE)
    facts = trainapp.plan(base)
    by_name = {entry["overrides"]: entry for entry in facts["levers"]}
    for name in ("parallel=fsdp", "activation_checkpointing=full"):
        alone = trainapp.plan([*base, *name.split(), NO_LEVERS])
        entry = by_name[name]
        assert entry["certainty"] == "range"
        assert (entry["peak_bytes"], entry["reserved_bytes"]) == (alone["allocated_bytes"], alone["reserved_bytes"])
    assert by_name["parallel=fsdp"]["reserved_bytes"] < facts["reserved_bytes"]
    assert facts["best"]["overrides"].startswith("batch.micro_size=")


@pytest.mark.slow
@needs_cuda
def test_a_rank_may_have_more_samples_and_larger_shards_than_the_last():
    facts = plan("parallel=fsdp", "plan.world=3", "data.vocab_size=31", "batch.global_size=7", DEVICE)
    peaks = facts["ranks"]["peak_bytes"]
    assert len(peaks) > 1
    assert facts["allocated_bytes"] == max(peaks.values())
    assert min(peaks.values()) < max(peaks.values())


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["static_graph", "find_unused_parameters"])
def test_a_map_in_the_drivers_memory_is_refused(setting):
    with pytest.raises(UserError, match=rf"plan without parallel\.ddp\.{setting}"):
        trainapp.plan([*SMALL, "parallel=ddp", f"parallel.ddp.{setting}=true", "plan.world=2", DEVICE])


def test_one_stream_does_not_reuse_what_another_has_freed():
    """A gathered message, freed, then an activation of its size."""
    events = [(1, 40 * MIB), (1, -40 * MIB), (2, 40 * MIB)]
    for expandable in (False, True):
        alone = Allocations(0, events=events).replayed(expandable)
        beside = Allocations(0, events=events, streams={1: 7}).replayed(expandable)
        assert (alone.peak_reserved, beside.peak_reserved) == (40 * MIB, 80 * MIB)
        assert alone.peak_allocated == beside.peak_allocated == 40 * MIB


def test_what_was_needed_to_build_counts_for_the_cache_alone():
    building = [(1, 64 * MIB), (2, 8 * MIB), (1, -64 * MIB)]
    allocations = Allocations(0, events=[(3, 16 * MIB)], building=building)
    allocator = allocations.replayed(expandable=True)
    assert allocations.peak_of_building == 72 * MIB
    assert allocator.peak_allocated == 24 * MIB
    assert allocator.peak_reserved == 80 * MIB
    assert not allocations.fit(True, 60 * MIB)
    warm = Allocations(0, events=[(3, 16 * MIB)], warm_up=[(4, 200 * MIB), (4, -200 * MIB)])
    assert warm.peak_of_building == 0
    assert warm.replayed(True).peak_allocated == 16 * MIB
    assert warm.replayed(True).peak_reserved == 200 * MIB


def test_groups_of_ranks_take_memory_that_no_plan_can_give():
    device = find("a100-80gb")
    assert device.cap_with(3) == device.cap - 3 * COMMUNICATOR
    assert device.cap == device.memory - CONTEXT - 2**30
    fsdp = Parallel(strategy="fsdp")
    assert communicators_of(Parallel()) == 0
    assert communicators_of(Parallel(strategy="ddp")) == 1
    assert communicators_of(fsdp) == 2
    assert communicators_of(Parallel(strategy="fsdp", fsdp=Fsdp(replicas=2))) == 3


def test_each_parameter_is_sharded_once_and_blocks_before_the_rest():
    with simulated(0, 2, torch.device("cpu")) as ranks:
        model = GPT(vocab_size=32, context_length=8, depth=2, width=16, heads=2)
        blocks = [len(list(block.parameters())) for block in model.blocks()]
        groups = list(FSDP(model, model.blocks(), ranks, Fsdp(), torch.float32).sharded_together())
    assert [len(group) for group in groups[:-1]] == blocks
    assert [id(p) for group in groups for p in group].count(id(model.head.weight)) == 1  # tied to the embedding
    assert {id(p) for group in groups for p in group} == {id(p) for p in model.parameters()}
    assert any(p is model.head.weight for p in groups[-1])


def test_a_simulated_rank_moves_to_a_device():
    ranks = SimulatedRanks(2, 4, torch.device("cpu"))
    there = ranks.on(torch.device("cuda", 0))
    assert (there.rank, there.world, there.device.type, ranks.device.type) == (2, 4, "cuda", "cpu")
