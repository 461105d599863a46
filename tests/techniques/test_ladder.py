"""Which technique a run turns on next, by what filled memory."""

import runs
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainapp.config import compose
from trainapp.memory.live_tensors import Category
from trainapp.techniques.catalogue import TECHNIQUES, Situation
from trainapp.techniques.ladder import LADDER, next_techniques, settings_with, with_turned_on
from trainapp.techniques.savings import Shortage

MIB = 2**20
SELECTIVE, FULL, CHUNK, INPUTS, ALL, OPTIMIZER = LADDER


class Blocks(nn.Module):
    """Ten linear layers of 16 KiB, each a block, and a head with many classes."""

    def __init__(self, classes: int = 4096):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(10))
        self.head = nn.Linear(64, classes, bias=False)

    def features(self, inputs):
        return inputs

    def blocks(self):
        return list(self.layers)


def chosen_next(*overrides: str, model: nn.Module | None = None, excluded=(), logit_rows=0, **of_shortage) -> list[str]:
    config = compose.from_command_line([*runs.MODELS["gpt"], *overrides])
    situation = Situation(config, model or Blocks(), knows_loss=True)
    held = {Category(name): size * MIB for name, size in of_shortage.pop("held").items()}
    shortage = Shortage(held, logit_rows=logit_rows, **of_shortage)
    return next_techniques(situation, shortage, excluded)


def test_all_are_in_the_catalogue_and_leave_the_result_the_same():
    by_setting = {technique.setting: technique for technique in TECHNIQUES}
    assert {by_setting[setting].result for setting in LADDER} == {"same"}


def test_the_cheapest_that_may_be_enough_comes_first():
    held = {"activations": 40}
    assert chosen_next(held=held, missing=10 * MIB) == [SELECTIVE, FULL]
    assert chosen_next(held=held, missing=30 * MIB) == [FULL, SELECTIVE]
    assert chosen_next(held=held, missing=10 * MIB, excluded=[SELECTIVE]) == [FULL]


def test_the_loss_in_chunks_comes_first_where_logits_are_most_of_the_activations():
    rows = 1024  # of 4096 logits in fp32, with their gradient: 32 MiB, less a chunk's
    assert chosen_next(held={"activations": 40}, missing=10 * MIB, logit_rows=rows)[0] == CHUNK
    assert chosen_next(held={"activations": 400}, missing=10 * MIB, logit_rows=rows) == [SELECTIVE, FULL, CHUNK]


def test_nothing_is_turned_on_that_cannot_be_enough():
    assert chosen_next(held={"activations": 40, "parameters": 80}, missing=50 * MIB) == []
    assert chosen_next(held={"parameters": 80, "optimizer_state": 80}, missing=MIB) == []
    assert chosen_next(held={"activations": 40}, missing=MIB, in_evaluation=True) == []


def test_what_the_command_line_sets_is_not_changed():
    held = {"activations": 40}
    assert chosen_next("activation_checkpointing=none", held=held, missing=MIB) == []
    assert chosen_next("memory.loss_chunk=null", held=held, missing=MIB, logit_rows=1024) == [SELECTIVE, FULL]
    config = compose.from_command_line([*runs.MODELS["gpt"], "activation_checkpointing=selective"])
    assert with_turned_on(config, [FULL]) == config
    assert with_turned_on(config, [CHUNK]).memory.loss_chunk == "auto"


def test_settings_that_exclude_each_other_are_not_combined():
    """Metrics get the logits."""
    metrics = "metrics={f1: {_target_: torchmetrics.F1Score, task: multiclass}}"
    assert chosen_next(metrics, held={"activations": 40}, missing=MIB, logit_rows=1024) == [SELECTIVE, FULL]


def test_a_technique_replaces_those_that_set_nothing_else():
    assert settings_with((SELECTIVE,), FULL) == (FULL,)
    assert settings_with((FULL,), CHUNK) == (FULL, CHUNK)
    assert settings_with((FULL, CHUNK), INPUTS) == (CHUNK, INPUTS)
    assert settings_with((INPUTS,), ALL) == (INPUTS, ALL)


def test_on_a_gpu_activations_and_optimizer_state_may_go_to_the_host():
    with FakeTensorMode():
        model = Blocks()
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cuda")))
    held = {"activations": 40, "optimizer_state": 40}
    assert chosen_next(held=held, missing=10 * MIB, model=model) == [SELECTIVE, FULL, INPUTS, ALL, OPTIMIZER]
    after_all = (SELECTIVE, FULL, INPUTS)
    assert chosen_next(held=held, missing=10 * MIB, model=model, excluded=after_all) == [ALL, OPTIMIZER]
    assert chosen_next(held={"optimizer_state": 40}, missing=10 * MIB, model=model) == [OPTIMIZER]
