"""Plans for a CUDA device that is not here, from the command line and from Python."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import runs
from helpers import run_cli

import trainapp
from trainapp.errors import UserError
from trainapp.planning.cuda import planner
from trainapp.planning.cuda.devices import CAPABILITIES, DEVICES, MIB, find, spelled
from trainapp.planning.cuda.pretend import can_pretend

needs_cuda = pytest.mark.skipif(not can_pretend(), reason="fake CUDA needs Linux on x86-64 or aarch64")
WIDE = ("model.width=256", "model.context_length=64", "model.depth=2")
NO_LEVERS = "plan.levers=false"
GPT = (*runs.MODELS["gpt"], "batch.global_size=32", "batch.micro_size=8", "batch.eval_micro_size=8", NO_LEVERS)


def test_the_table_is_plausible():
    """Memory a little below what the name says; a workspace of 8.125 MiB, 32 MiB from Hopper on."""
    for device in DEVICES.values():
        named = int(device.name.rpartition("-")[2].removesuffix("gb"))
        assert 0.9 * named * 2**30 < device.memory < 1.0 * named * 2**30, device.name
        assert device.cap == device.memory - 512 * MIB - 2**30
    assert find("a100-40gb").cublas_workspace == 8_519_680
    assert find("h100-80gb").cublas_workspace == 32 * MIB
    assert not find("v100-32gb").has_flash_attention


def test_a_device_that_is_not_in_the_table_is_named_by_what_counts():
    device = find("24GiB@8.9")
    assert (device.memory, device.capability, device.name) == (24 * 2**30, (8, 9), "24GiB@8.9")
    here = SimpleNamespace(total_memory=device.memory, major=8, minor=9)
    assert find(spelled(here)) == dataclasses.replace(device, name=spelled(here))
    for name in ("24GiB", "GiB@8.9", "24GiB@8", "0GiB@8.0", "24GiB@8.9x"):
        with pytest.raises(UserError, match="unknown; known are"):
            find(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("24GiB@0.0", "no GPU has compute capability 0.0; use one of 5.0, "),
        ("24GiB@99.9", "no GPU has compute capability 99.9"),
        ("24@8.9", "a GPU has between 1.0 GiB and "),
        ("24TiB@8.9", "a GPU has between 1.0 GiB and "),
    ],
)
def test_a_device_that_cannot_exist_is_refused(tmp_path, name, reason):
    done = run_cli("mode=plan", *runs.MODELS["gpt"], f"plan.device={name}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"trainapp: plan.device={name}: {reason}")
    assert done.stderr.count("\n") == 1


def test_every_device_in_the_table_has_a_capability_that_exists():
    assert {device.capability for device in DEVICES.values()} <= set(CAPABILITIES)


@pytest.mark.slow
@needs_cuda
def test_the_command_line_plans_for_a_device_that_is_not_here(tmp_path):
    done = run_cli("mode=plan", *runs.MODELS["gpt"], "plan.device=h100-80gb", "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "here/plan.json").read_text())
    assert facts["certainty"] == "predicted"
    assert facts["device"]["name"] == "h100-80gb"
    assert facts["limit_bytes"] == find("h100-80gb").cap
    assert facts["peak_bytes"] == facts["allocated_bytes"] == max(facts["phases"].values())
    assert facts["peak_bytes"] == sum(facts["kinds"].values())
    assert facts["kinds"]["libraries"] == 64 * MIB
    assert facts["reserved_bytes"] >= facts["allocated_bytes"]
    assert "on h100-80gb, predicted without it, with expandable segments" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("batch.micro_size=")


@pytest.mark.slow
@needs_cuda
def test_the_device_its_numerics_and_its_optimizer_decide():
    """What differs on a GPU: attention's kernel, autocast's lists, foreach instead of a loop."""
    on_cpu = trainapp.plan([*GPT, "precision=bf16", "train.device=cpu"])
    facts = {
        name: trainapp.plan([*GPT, f"plan.device={name}", "precision=bf16"]) for name in ("a100-80gb", "v100-32gb")
    }
    assert facts["a100-80gb"]["static"]["parameters"] == on_cpu["static"]["parameters"]
    assert facts["v100-32gb"]["kinds"]["activations"] > facts["a100-80gb"]["kinds"]["activations"]
    assert facts["a100-80gb"]["kinds"]["activations"] != on_cpu["kinds"]["activations"]
    foreach, plain = (
        trainapp.plan([*GPT, *WIDE, "plan.device=a100-80gb", "optimizer.fused=false", f"+optimizer.foreach={how}"])
        for how in ("true", "false")
    )
    more = foreach["phases"]["optimizer_step"] - plain["phases"]["optimizer_step"]
    assert more > 0.5 * foreach["static"]["parameters"]


@pytest.mark.slow
@needs_cuda
def test_the_largest_size_is_the_largest_that_the_allocator_serves():
    """Fits at N, and not at N + 1, by plans of one size each."""
    base = (*runs.MODELS["gpt"], *WIDE, "batch.global_size=64", "plan.device=a100-40gb", "every.eval=null", NO_LEVERS)

    def reserved(size):
        return trainapp.plan([*base, f"batch.micro_size={size}"])["reserved_bytes"]

    limit = (reserved(4) + reserved(64)) // 2
    largest = trainapp.plan([*base, f"memory.limit={limit}"])["largest_micro_size"]
    assert 4 < largest < 64
    assert reserved(largest) <= limit < reserved(largest + 2)  # a page of 20 MiB may hold one size more


@pytest.mark.slow
@needs_cuda
def test_fixed_segments_reserve_more_or_the_same():
    facts = {
        text: trainapp.plan([*GPT, "plan.device=a100-40gb", f"memory.expandable_segments={text}"])
        for text in ("true", "false")
    }
    assert facts["true"]["reserved_bytes"] <= facts["false"]["reserved_bytes"]
    assert facts["true"]["expandable_segments"] is True


@pytest.mark.slow
@needs_cuda
def test_convolutions_are_said_to_need_more():
    notes = trainapp.plan([*runs.MODELS["resnet"], "plan.device=l4-24gb", "batch.micro_size=4", NO_LEVERS])["notes"]
    assert any("cuDNN" in note for note in notes)
    assert trainapp.plan([*GPT, "plan.device=l4-24gb", "precision=bf16"])["notes"] == []


@needs_cuda
def test_what_a_model_that_reads_values_may_need_is_reserved_too(tmp_path):
    """The trace's first answer needs a third of what the other one does."""
    group = tmp_path / "conf" / "model"
    group.mkdir(parents=True)
    (group / "own.yaml").write_text("_target_: planned_models.Reading\n")
    base = ("model=own", "data=digits", "user_packages=[planned_models]", "batch.global_size=1024", "every.eval=null")
    facts = trainapp.plan(
        [*base, "plan.device=a100-40gb", "batch.micro_size=1024", NO_LEVERS], config_dir=tmp_path / "conf"
    )
    low, high = facts["range_bytes"]
    assert 1.5 * low < high == facts["allocated_bytes"] <= facts["reserved_bytes"]


@pytest.mark.slow
@needs_cuda
def test_a_recurrent_layer_is_not_traceable(tmp_path):
    (tmp_path / "recurrent.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)\n"
        "    def forward(self, images):\n"
        "        return self.head(self.rnn(images[:, 0])[0][:, -1])\n"
    )
    done = run_cli(
        "mode=plan", "plan.device=a100-40gb", "data=digits", "model._target_=recurrent.Net",
        "user_packages=[recurrent]",
        "~model.norm", "~model.width", "~model.depth", "~model.stem", "hydra.run.dir=here", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("not traceable: NotImplementedError: lstm: what cuDNN keeps")
    assert "`parallel=single train.device=cpu` without plan.device" in done.stdout


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("chosen", [("adamw_bf16", "precision=bf16_pure"), ("adamw_8bit",), ("adamw_4bit",)])
def test_optimizers_that_round_by_chance_keep_what_they_keep_on_the_cpu(chosen):
    overrides = (*GPT, *WIDE, f"optimizer={chosen[0]}", *chosen[1:], "every.eval=null")
    here = trainapp.plan([*overrides, "train.device=cpu"])
    there = trainapp.plan([*overrides, "plan.device=a100-40gb"])
    assert there["certainty"] == "predicted", there
    assert there["static"] == here["static"]
    assert there["static"]["optimizer_state"] > 0


@pytest.mark.slow
@needs_cuda
def test_an_optimizer_that_makes_a_generator_by_itself_is_not_traceable(tmp_path, monkeypatch):
    (tmp_path / "drawing.py").write_text(
        "import torch\n"
        "class Drawing(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        torch.Generator(self.param_groups[0]['params'][0].device)\n"
        "        return super().step(closure)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ("~optimizer.betas", "~optimizer.eps", "optimizer._target_=drawing.Drawing", "user_packages=[drawing]")
    facts = trainapp.plan([*GPT, *own, "plan.device=a100-40gb"])
    assert facts["certainty"] == "not traceable"
    assert "Generator" in facts["reason"] or "CUDA generator" in facts["reason"]


@pytest.mark.slow
@needs_cuda
def test_fused_sgd_is_planned():
    """torch has no kernel of it for tensors without data. One moment of AdamW's two, but for AdamW's step counts."""
    base = (*GPT, *WIDE, "plan.device=a100-40gb", "every.eval=null")
    plain, sgd = trainapp.plan(base), trainapp.plan([*base, "optimizer=sgd"])
    assert sgd["certainty"] == "predicted", sgd
    assert 2 * sgd["static"]["optimizer_state"] == pytest.approx(plain["static"]["optimizer_state"], rel=1e-3)
    assert sgd["static"]["optimizer_state"] == sgd["static"]["parameters"]


@pytest.mark.slow
@needs_cuda
def test_levers_have_the_peaks_of_their_own_plans():
    """And a time by the data sheet. The configuration fits, and so is the best plan."""
    base = tuple(part for part in GPT if part != NO_LEVERS)
    facts = trainapp.plan([*base, *WIDE, "plan.device=a100-40gb", "every.eval=null"])
    by_name = {entry["overrides"]: entry for entry in facts["levers"]}
    assert not any("parallel" in name for name in by_name)
    for name in (
        "activation_checkpointing=full",
        "memory.offload_activations=all",
        "optimizer=adamw_8bit",
        "precision=bf16",
    ):
        alone = trainapp.plan([*base, *WIDE, *name.split(), NO_LEVERS, "plan.device=a100-40gb", "every.eval=null"])
        entry = by_name[name]
        assert (entry["peak_bytes"], entry["reserved_bytes"]) == (alone["allocated_bytes"], alone["reserved_bytes"]), (
            name
        )
        assert entry["certainty"] == "predicted"
    assert by_name["activation_checkpointing=full"]["reserved_bytes"] < facts["reserved_bytes"]
    assert any(len(name.split()) > 2 for name in by_name)  # stacks
    times = {name: entry["relative_time"] for name, entry in by_name.items()}
    assert 1.05 < times["activation_checkpointing=full"] < 4  # of operations as small as these most is Python
    assert all(times.values())
    assert facts["best"]["overrides"] == f"batch.micro_size={facts['largest_micro_size']}"
    assert facts["best"]["missing_bytes"] == 0
    assert 0 < facts["best"]["relative_time"] <= 1  # fewer micro-batches
    assert facts["traces"] <= 60


@needs_cuda
@pytest.mark.parametrize(("device", "is_listed"), [("t4-16gb", False), ("l4-24gb", True)])
def test_bf16_is_listed_for_devices_that_compute_in_it(device, is_listed):
    listed = trainapp.plan([*GPT, "plan.levers=true", f"plan.device={device}", "every.eval=null"])["levers"]
    assert any("bf16" in entry["overrides"].replace("adamw_bf16", "") for entry in listed) is is_listed
    assert any("optimizer=adamw_bf16" in entry["overrides"] for entry in listed)  # computes in fp32


@pytest.mark.slow
@needs_cuda
def test_the_best_plan_fits_where_the_configuration_does_not(tmp_path):
    base = tuple(part for part in GPT if part not in (NO_LEVERS, "batch.micro_size=8"))
    base = (*base, *WIDE, "model.context_length=256", "plan.device=a100-40gb", "every.eval=null")
    least = trainapp.plan([*base, "batch.micro_size=1", NO_LEVERS])["reserved_bytes"]
    limit = f"memory.limit={least - 4 * MIB}"
    done = run_cli("mode=plan", *base, limit, "hydra.run.dir=here", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "here/plan.json").read_text())
    assert facts["largest_micro_size"] == 0
    best = done.stdout.splitlines()[-1]
    assert best == facts["best"]["overrides"]
    assert "peak    reserved  largest     time  certainty" in done.stdout
    assert "time: by the GPU's data sheet" in done.stdout
    assert facts["best"]["result"] == "same"
    alone = trainapp.plan([*base, *best.split(), limit, NO_LEVERS])
    assert alone["reserved_bytes"] == facts["best"]["reserved_bytes"] <= least - 4 * MIB
    assert alone["largest_micro_size"] == facts["best"]["micro_size"] >= 1


@needs_cuda
def test_an_evaluation_that_does_not_fit_gets_a_smaller_size():
    """Where training fits: no lever is needed, and the plan is not that nothing fits."""
    base = (*runs.MODELS["gpt"], "batch.global_size=8", "batch.micro_size=1", "data.val_size=512", *WIDE)
    base = (*base, "plan.device=a100-40gb", "optimizer=sgd")
    training, both = (
        trainapp.plan([*base, f"batch.eval_micro_size={size}", NO_LEVERS])["reserved_bytes"] for size in (1, 512)
    )
    assert training + 16 * MIB < both
    limit = (training + both) // 2
    facts = trainapp.plan([*base, "batch.eval_micro_size=512", f"memory.limit={limit}"])
    best = facts["best"]
    assert facts["largest_micro_size"]
    assert (best["missing_bytes"], best["result"]) == (0, "same")
    assert 1 <= best["eval_micro_size"] < 512
    assert best["overrides"] == f"batch.micro_size={best['micro_size']} batch.eval_micro_size={best['eval_micro_size']}"
    alone = trainapp.plan([*base, *best["overrides"].split(), f"memory.limit={limit}", NO_LEVERS])
    assert alone["reserved_bytes"] == best["reserved_bytes"] <= limit


@pytest.mark.slow
@needs_cuda
def test_activation_offload_is_planned():
    """What it saves; all of what checkpointing leaves goes, too."""
    deep = (
        *GPT,
        "model.depth=4",
        "model.width=128",
        "model.context_length=256",
        "plan.levers=false",
        "every.eval=null",
    )
    peaks = {
        name: trainapp.plan([*deep, *chosen, "plan.device=a100-40gb"])["kinds"]["activations"]
        for name, chosen in {
            "none": (),
            "all": ("memory.offload_activations=all",),
            "full": ("activation_checkpointing=full",),
            "inputs": ("activation_checkpointing=full", "memory.offload_activations=inputs"),
        }.items()
    }
    assert peaks["all"] < 0.1 * peaks["none"]
    assert peaks["inputs"] < 0.2 * peaks["full"] < 0.1 * peaks["none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("plan.device=h100",), "plan.device=h100: unknown; known are t4-16gb"),
        (("plan.device=l4-24gb", "train.device=cpu"), "use train.device=auto"),
        (("plan.device=l4-24gb", "memory.limit=40GiB"), "memory.limit=40GiB: plan.device=l4-24gb has 22.0 GiB"),
        (("plan.device=l4-24gb", "train.compile=true"), "train.compile=true"),
    ],
)
def test_mistakes(overrides, message):
    with pytest.raises(UserError) as caught:
        trainapp.plan([*GPT, *overrides])
    assert message in str(caught.value)


def test_without_fake_cuda_there_is_a_band_and_no_size(monkeypatch):
    """As on a laptop with another system. In this process: only the CPU is traced."""
    from trainapp.config import compose
    from trainapp.planning import planner as plans

    monkeypatch.setattr(planner, "can_pretend", lambda: False)
    facts, _ = plans.plan(compose.from_command_line([*GPT, "plan.device=a100-40gb"]))
    low, high = facts["range_bytes"]
    assert facts["certainty"] == "range"
    assert 16 * MIB < low < facts["peak_bytes"] == high
    assert facts["largest_micro_size"] is None
    assert "reserved_bytes" not in facts
    assert any("only traced on the CPU" in note for note in facts["notes"])
