"""The one list of techniques: advice, refusals and documentation read it."""

import dataclasses
from types import SimpleNamespace

import pytest
import runs
import torch
from helpers import ROOT
from torch import nn

from trainapp.config import compose
from trainapp.config.schema import Fsdp, Memory, Parallel
from trainapp.errors import UserError
from trainapp.planning.simulated_ranks import simulated
from trainapp.techniques import catalogue
from trainapp.techniques.catalogue import TECHNIQUES, Situation, Technique


class OnGpu(nn.Module):
    """With blocks, and as if on a GPU: only where its parameters are is read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def blocks(self):
        return list(self.layers)

    def parameters(self, recurse=True):
        yield SimpleNamespace(device=torch.device("cuda"), requires_grad=False)


def by_name(techniques):
    return pytest.mark.parametrize("technique", techniques, ids=lambda technique: technique.setting)


def without_rates(config):
    """Without what an optimizer's file sets beside what concerns memory, and without the command."""
    optimizer = dataclasses.replace(config.optimizer, lr=1.0, weight_decay=0.0)
    return dataclasses.replace(config, optimizer=optimizer, command="")


def surroundings(technique: Technique) -> list[str]:
    """What the setting needs beside the default: the group that has it, or another setting."""
    if technique.setting == "optimizer.in_backward=true":
        return ["train.grad_clip=null"]
    if technique.setting == "adapter.base_dtype=bf16":
        return ["adapter=lora", "precision=bf16"]
    if technique.setting.startswith("adapter."):
        return ["adapter=lora"]
    return ["parallel=fsdp"] if technique.setting.startswith("parallel.") else []


def means_what_it_says(technique: Technique) -> bool:
    default = compose.from_command_line(surroundings(technique))
    written = compose.from_command_line([*surroundings(technique), *technique.setting.split()])
    changed = catalogue.with_techniques(default, [technique])
    return without_rates(changed) == without_rates(written)


@by_name(TECHNIQUES)
def test_the_setting_on_the_command_line_makes_the_changes(technique):
    assert means_what_it_says(technique)
    assert technique.is_set(compose.from_command_line([*surroundings(technique), *technique.setting.split()]))


def test_the_document_has_the_list():
    page = (ROOT / "docs" / "memory.md").read_text()
    table = page.partition("| setting | saves | costs | applies |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [f"| `{one.setting}` | {one.saves} | {one.costs} |" for one in catalogue.TECHNIQUES]
    assert [row.rpartition(" | ")[0] + " |" for row in table.splitlines()] == rows


def test_what_applies_is_offered_unless_it_is_in_force(tmp_path):
    run = runs.closed(tmp_path, *runs.MODELS["gpt"], "precision=bf16", "train.ema=0.9", "memory.loss_chunk=7")
    offered = {technique.setting for technique in catalogue.available(Situation(run.config, run.state.model, True))}
    assert {"train.ema=null", "activation_checkpointing=full", "optimizer=sgd"} <= offered
    assert not offered & {"precision=bf16", "memory.loss_chunk=auto", "parallel.fsdp.cpu_offload=true"}
    nothing = {technique.setting for technique in catalogue.available(Situation(run.config, nn.Linear(2, 2), False))}
    modes = {f"activation_checkpointing={mode}" for mode in ("full", "selective", "auto")}
    assert offered - nothing == modes | {"adapter=lora"}


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ((), {"all", "inputs"}),
        (("parallel=fsdp",), {"inputs"}),
        (("activation_checkpointing=full",), {"all", "inputs"}),
        (("memory.offload_activations=all",), {"inputs"}),
        (("train.compile=true",), set()),
    ],
)
def test_activation_offload_is_offered_where_the_table_says(given, offered):
    situation = Situation(compose.from_command_line([*runs.MODELS["gpt"], *given]), OnGpu(), knows_loss=False)
    settings = [technique.setting.split()[0] for technique in catalogue.available(situation)]
    names = {setting.partition("=")[2] for setting in settings if setting.startswith("memory.offload")}
    assert names == offered


def names_of(model, *given):
    situation = Situation(compose.from_command_line([*runs.MODELS["gpt"], *given]), model, knows_loss=False)
    return {technique.setting for technique in catalogue.available(situation)}


@pytest.mark.parametrize(("ranks", "devices", "is_offered"), [(1, 1, False), (4, 1, True), (1, 2, True)])
def test_fsdp_is_offered_to_several_ranks_or_gpus_and_models_with_blocks(monkeypatch, ranks, devices, is_offered):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with simulated(0, ranks, torch.device("cpu")):
        assert ("parallel=fsdp" in names_of(OnGpu())) is is_offered
        assert "parallel=fsdp" not in names_of(nn.Linear(2, 2))


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bf16_is_offered_where_the_gpu_computes_in_it(monkeypatch, has_bf16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    both = {"precision=bf16", "precision=bf16_pure optimizer=adamw_bf16"}
    assert names_of(OnGpu()) & both == (both if has_bf16 else set())
    assert both <= names_of(nn.Linear(2, 2))  # on the CPU, where a plan's times show it


def test_the_update_in_the_backward_changes_the_result_only_where_it_replaces_clipping(tmp_path):
    results = {}
    for clip in ("1.0", "null"):
        config = runs.configure(tmp_path, *runs.MODELS["mlp"], f"train.grad_clip={clip}")
        offered = catalogue.available(Situation(config, nn.Linear(2, 2), True))
        results[clip] = {one.setting: one.result for one in offered if "in_backward" in one.setting}
    assert results == {
        "1.0": {"optimizer.in_backward=true train.grad_clip=null": "other"},
        "null": {"optimizer.in_backward=true": "same"},
    }


def test_an_option_of_an_optimizer_needs_no_setting_of_ours(tmp_path, monkeypatch):
    """Many classes have no fused kernel, some no weight decay, and a rate may be the class's own."""
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "lion.yaml").write_text("_target_: own.Lion\nbetas: [0.9, 0.99]\n")
    monkeypatch.setattr(catalogue, "CONF", tmp_path)
    changes = catalogue.Technique(
        "optimizer=lion", "half of AdamW's state", "another optimizer", relieves=frozenset()
    ).changes
    assert changes == {"optimizer.target": "own.Lion", "optimizer.arguments": {"betas": [0.9, 0.99]}}


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model=resnet", "model.width=4", "memory.loss_chunk=auto"),
            "memory.loss_chunk=auto: ResNet does not separate its last layer; give it a method",
        ),
        (
            ("model=mlp", "parallel=fsdp", "parallel.devices=1", "parallel.fsdp.meta_init=true"),
            "parallel.fsdp.meta_init=true: MLP has no method `init_weights()`",
        ),
    ],
)
def test_a_technique_that_the_model_does_not_allow_is_refused(tmp_path, overrides, message):
    assert runs.refusal(tmp_path, *overrides).startswith(message)


def test_all_refusals_at_once(tmp_path):
    config = runs.configure(tmp_path, "model=mlp")
    config = dataclasses.replace(config, memory=Memory(loss_chunk=4), parallel=Parallel(fsdp=Fsdp(meta_init=True)))
    with pytest.raises(UserError) as refused:
        catalogue.require_suited(Situation(config, nn.Linear(2, 2), True))
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (("optimizer=adamw",), "rounded"),
        (("optimizer=adamw", "+optimizer.amsgrad=true"), "other"),
        (("optimizer=sgd",), "other"),
    ],
)
def test_adamw_in_fewer_bits_is_another_algorithm_for_all_but_adamw(given, result):
    situation = Situation(compose.from_command_line(given), nn.Linear(2, 2), knows_loss=False)
    found = {technique.setting: technique.result for technique in catalogue.available(situation)}
    assert found["optimizer=adamw_4bit"] == result


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        (
            ("optimizer=adamw",),
            {"sgd", "sgd optimizer.momentum=0", "adamw_bf16", "adamw_8bit", "adamw_4bit", "adafactor", "muon"},
        ),
        (("optimizer=sgd",), {"sgd optimizer.momentum=0", "adamw_8bit", "adamw_4bit", "adafactor"}),  # one moment
        (("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"), set()),
        (("optimizer=adamw_4bit",), {"sgd optimizer.momentum=0", "adafactor"}),
        (("optimizer=muon",), {"sgd optimizer.momentum=0", "adamw_8bit", "adamw_4bit", "adafactor"}),
    ],
)
def test_an_optimizer_is_offered_only_if_its_state_is_smaller(given, offered):
    situation = Situation(compose.from_command_line(given), nn.Linear(2, 2), knows_loss=False)
    settings = [technique.setting for technique in catalogue.available(situation)]
    optimizers = {setting.removeprefix("optimizer=") for setting in settings if setting.startswith("optimizer=")}
    assert {setting.removesuffix(" optimizer.nesterov=false") for setting in optimizers} == offered


class OwnOptimizer(torch.optim.Adam):
    """A user's class."""


@pytest.mark.parametrize("target", ["test_catalogue.OwnOptimizer", "torch.optim.NAdam"])
def test_no_option_is_offered_in_place_of_a_class(target):
    """The class would stay, and get the lr of `optimizer=sgd`, or a momentum."""
    own = (f"optimizer._target_={target}", "user_packages=[test_catalogue]")
    situation = Situation(compose.from_command_line(own), nn.Linear(2, 2), knows_loss=False)
    offered = {technique.setting for technique in catalogue.available(situation)}
    assert "precision=bf16" in offered
    assert not any("optimizer=" in setting for setting in offered)
