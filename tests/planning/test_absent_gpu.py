"""Plans for a CUDA device that is not here: what is pretended is in force, and plans follow from the device."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import runs
import torch
from helpers import run_cli
from torch import nn

import trainapp
from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.memory.cuda import HEADROOM
from trainapp.planning import absent_gpu, fitting, planner, pretend
from trainapp.planning.absent_gpu import COMMUNICATOR, CONTEXT, DEVICES, MIB
from trainapp.planning.process import NoAnswer

needs_cuda = pytest.mark.skipif(not pretend.can_pretend(), reason="fake CUDA needs Linux on x86-64 or aarch64")
NO_TECHNIQUES = "plan.techniques=false"
WIDE = ("model.width=256", "model.context_length=64", "model.depth=2")
GPT = (*runs.MODELS["gpt"], "batch.global_size=32", "batch.micro_size=8", "batch.eval_micro_size=8", NO_TECHNIQUES)


def find(name, *more):
    return absent_gpu.find(compose.from_command_line(["model=mlp", f"plan.device={name}", *more]))


def plan(*overrides):
    facts = trainapp.plan([*GPT, *overrides])
    assert (facts["method"], facts["margin"]) == ("traced", 0.1), facts["notes"]
    return facts


def on_the_cpu(*overrides):
    return planner.plan(compose.from_command_line([*GPT, *overrides, "train.device=cpu"]))[0]


def test_the_table_is_plausible():
    """Memory a little below what the name says."""
    for name, (memory, capability) in DEVICES.items():
        named = int(name.rpartition("-")[2].removesuffix("gb"))
        assert 0.9 * named * 1024 < memory < 1.0 * named * 1024, name
        assert (7, 0) <= capability <= (9, 0)
    config = compose.from_command_line(["model=mlp", "plan.device=h100-80gb"])
    assert find("h100-80gb").limit(config) == DEVICES["h100-80gb"][0] * MIB - CONTEXT - HEADROOM
    other = find("24GiB@8.9")  # named by what counts
    assert (other.memory, other.capability, other.name) == (24 * 2**30, (8, 9), "24GiB@8.9")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("24GiB",), "plan.device=24GiB: unknown; known devices are t4-16gb"),
        (("24GiB@8.9x",), "unknown; known devices are"),
        (("l4-24gb", "train.device=cpu"), "use train.device=auto"),
        (("l4-24gb", "memory.limit=40GiB"), "memory.limit=40GiB: plan.device=l4-24gb has 22.0 GiB"),
    ],
)
def test_mistakes(overrides, message):
    with pytest.raises(UserError) as caught:
        find(*overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(("parallel", "groups"), [("ddp", 1), ("fsdp", 2), ("hsdp", 3)])
def test_groups_of_ranks_take_memory_that_no_plan_can_give(parallel, groups):
    chosen = ("model=mlp", "plan.device=h100-80gb", "plan.world=4")
    alone, spread = (compose.from_command_line([*chosen, *more]) for more in ((), (f"parallel={parallel}",)))
    alone.plan.world = 1
    gpu = find("h100-80gb")
    assert gpu.limit(alone) - gpu.limit(spread) == groups * COMMUNICATOR


# --- what is pretended


@pytest.fixture(scope="module")
def found():
    names = (
        "backward", "numerics", "no_autocast", "bytes_of_attention", "recomputed_attention", "residual_gradients",
        "sharded", "on_the_cpu", "offloaded", "snapshots",
    )  # fmt: skip
    path = str(Path(__file__).with_name("pretended.py"))
    found_in = [str(helpers.ROOT / "tests/helpers"), os.environ.get("PYTHONPATH", "")]
    env = helpers.environment({"PYTHONPATH": os.pathsep.join(found_in)})
    done = subprocess.run([sys.executable, path, *names], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_cuda
def test_a_backward_autocast_the_scaler_and_foreach_kernels_are_as_on_a_device(found):
    assert found["backward"] == "cuda:0"
    assert found["numerics"] == ["torch.float16", "torch.float32", True, 1]
    assert found["no_autocast"] is False  # the comparison can fail


@pytest.mark.slow
@needs_cuda
def test_attention_keeps_what_the_kernel_of_the_device_keeps(found):
    """The output and one fp32 per query; the plain product keeps all weights. Ampere has bf16, Volta has not."""
    fused = {name: kept for name, (kept, _) in found["bytes_of_attention"].items()}
    queries, width = 2 * 4 * 256, 64
    for name in ("a100-80gb float16", "a100-80gb bfloat16", "v100-32gb float16"):
        assert fused[name] == pytest.approx(queries * (2 * width + 4), abs=4096), name
    assert fused["a100-80gb float32"] == pytest.approx(queries * (4 * width + 4), abs=4096)
    assert fused["v100-32gb bfloat16"] > queries * 2 * 256
    assert found["recomputed_attention"] == ["_scaled_dot_product_flash_attention"] * 2
    # The backward: the gradient of the output; those of q, k and v; that of q in fp32, and one number per query.
    kept, peak = found["bytes_of_attention"]["a100-80gb bfloat16"]
    of_one = queries * width * 2
    assert peak - kept == pytest.approx(of_one + 3 * of_one + 2 * of_one + queries * 4, abs=4096)


@pytest.mark.slow
@needs_cuda
def test_gradients_are_added_up_in_place_and_shards_are_those_of_many_ranks(found):
    assert found["residual_gradients"] == [2, 3]  # with it, and without
    assert found["sharded"] == [[1, 4], [1, 4]]
    without, with_offload = found["offloaded"]
    assert with_offload < without


# MiB allocated at the peak of public snapshots, by context length (see data/README.md).
RECORDED = {"128": 6688.44, "256": 8681.82, "512": 11850.96, "1024": 23085.75}


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("context", RECORDED)
def test_a_step_allocates_what_a_real_gpu_has_recorded(found, context):
    assert found["snapshots"][context] == pytest.approx(RECORDED[context], rel=0.05)


@pytest.mark.slow
def test_a_trace_on_the_cpu_has_cudas_rules(found):
    """Norms in fp32 under autocast, a byte per element of dropout's mask, no attention weights."""
    norm, dropout, attended = found["on_the_cpu"]
    assert norm == "torch.float32"
    assert dropout == 1.25
    assert attended < 1.1


# --- plans


@pytest.mark.slow
@needs_cuda
def test_the_command_line_plans_for_a_device_that_is_not_here(tmp_path):
    done = run_cli("mode=plan", *GPT, "plan.device=h100-80gb", "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "here/plan.json").read_text())
    assert (facts["method"], facts["margin"]) == ("traced", 0.1)
    assert facts["peak_bytes"] == max(facts["phases"].values()) == sum(facts["categories"].values())
    assert facts["categories"]["libraries"] == 64 * MIB
    assert done.stdout.splitlines()[-1].startswith("batch.micro_size=")


@pytest.mark.slow
@needs_cuda
def test_the_device_decides():
    """Attention's kernel; what is known of it leaves nothing to note."""
    new, old = (plan(f"plan.device={name}", "precision=bf16") for name in ("a100-80gb", "v100-32gb"))
    assert old["categories"]["activations"] > new["categories"]["activations"]
    assert new["notes"] == []


@pytest.mark.slow
def test_the_largest_size_leaves_the_margin():
    """In this process, on the CPU in place of the device."""
    base = (*GPT, *WIDE, "batch.global_size=64", "batch.micro_size=auto", "plan.device=a100-40gb", "every.eval=null")

    def planned(*more):
        config = compose.from_command_line([*base, *more])
        return fitting.Planner(config, planner.estimator_of(config, "traced as on the CPU"))

    peak = functools.cache(lambda size: planned().peak(size).total)
    limit = (peak(4) + peak(64)) // 2
    largest = planned(f"memory.limit={limit}").largest
    assert 4 < largest < 64
    assert peak(largest) * 1.3 <= limit < peak(largest + 1) * 1.3


def test_recurrent_layers_are_measured():
    """Without cuDNN torch takes them apart: another figure, and no error."""
    session = SimpleNamespace(engine=SimpleNamespace(), state=SimpleNamespace(model=nn.LSTM(8, 16)))
    with pytest.raises(NotImplementedError, match="what cuDNN keeps for a recurrent layer"):
        find("l4-24gb").prepare(session)


@pytest.mark.slow
@needs_cuda
def test_convolutions_are_said_to_need_more():
    notes = trainapp.plan([*runs.MODELS["resnet"], "plan.device=l4-24gb", "batch.micro_size=4", NO_TECHNIQUES])["notes"]
    assert any("cuDNN" in note for note in notes)


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "sgd"])
def test_optimizers_keep_what_they_keep_on_the_cpu(optimizer):
    """Those that round by chance ask for a generator on the device; fused SGD has no fake kernel."""
    overrides = (*WIDE, f"optimizer={optimizer}", "every.eval=null")
    here = on_the_cpu(*overrides)["categories"]
    there = plan(*overrides, "plan.device=a100-40gb")["categories"]
    assert there["optimizer_state"] == here["optimizer_state"] > 0


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("parallel", [("parallel=ddp",), ("parallel=hsdp", "precision=bf16")])
def test_a_rank_keeps_on_the_device_what_it_keeps_on_the_cpu(parallel):
    chosen = (*parallel, *WIDE, "plan.world=4", "batch.micro_size=4", "every.eval=null")
    here = on_the_cpu(*chosen)
    there = plan(*chosen, "plan.device=h100-80gb")
    assert there["ranks"]["world"] == 4
    assert there["ranks"]["replicas"] == here["ranks"]["replicas"]
    for name in ("parameters", "optimizer_state"):
        assert there["categories"][name] == here["categories"][name]


@pytest.mark.slow
@needs_cuda
def test_a_model_that_is_built_whole_counts_until_it_is_sharded():
    wide = ("model.depth=16", "model.width=512", "plan.world=64", "batch.global_size=64", "batch.micro_size=1")
    wide = (*wide, "plan.device=h100-80gb", "every.eval=null", "parallel=fsdp")
    whole, shards = (plan(*wide, f"parallel.fsdp.meta_init={meta}") for meta in ("false", "true"))
    assert whole["phase"] == "building"
    assert whole["categories"] == {"parameters": whole["peak_bytes"]}
    assert any("parallel.fsdp.meta_init=true" in note for note in whole["notes"])
    assert "building" not in shards["phases"]
    assert shards["peak_bytes"] < whole["peak_bytes"]


@pytest.mark.slow
def test_without_fake_cuda_a_trace_on_the_cpu_stands_in(monkeypatch):
    """As on a laptop with another system. In this process."""
    monkeypatch.setattr(pretend, "can_pretend", lambda: False)
    config = compose.from_command_line([*GPT, "plan.device=a100-40gb", "precision=bf16"])
    with pytest.raises(RuntimeError, match="fake CUDA tensors need Linux"):
        planner.plan(config)
    facts, _ = planner.plan(config, method="traced as on the CPU")
    assert (facts["method"], facts["margin"]) == ("traced", 0.3)
    assert facts["largest_micro_size"] == 32


@pytest.mark.slow
@needs_cuda
def test_a_gpu_of_this_machine_is_planned_where_nothing_sees_it(monkeypatch):
    """In a process of its own, whose result and refusal are those of a plan for that GPU."""
    monkeypatch.setattr(planner, "choose_device", lambda setting: torch.device("cuda", 0))
    monkeypatch.setattr(absent_gpu, "device_spec", lambda device: "a100-40gb")
    config = compose.from_command_line(GPT)
    facts = planner.plan_and_draw(config, None, False, "traced")
    assert facts["peak_bytes"] == plan("plan.device=a100-40gb")["peak_bytes"] != on_the_cpu()["peak_bytes"]
    config.train.compile = True
    with pytest.raises(NoAnswer, match=r"^NeedsValues: no trace knows"):
        planner.plan_and_draw(config, None, False, "traced")
