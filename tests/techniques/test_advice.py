"""What is advised after memory ran out: what relieves the category that filled it, and how much that is."""

import dataclasses

import pytest
import runs
import torch
from torch import nn

from trainapp.config import compose
from trainapp.memory.live_tensors import Category
from trainapp.optim import fused_adamw
from trainapp.techniques.advice import MOST_ADVISED, advised
from trainapp.techniques.catalogue import TECHNIQUES, Situation, available
from trainapp.techniques.savings import Shortage

MIB = 2**20
WIDTH = 512
PARAMETERS, GRADIENTS, STATE = Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE
ACTIVATIONS, AVERAGE = Category.ACTIVATIONS, Category.WEIGHT_AVERAGE
COPIES = 11 * MIB / 2  # in 16 bits, of the weights of `Blocks`
FULL = {PARAMETERS: 10 * MIB, GRADIENTS: 10 * MIB, STATE: 20 * MIB, ACTIVATIONS: 15 * MIB, AVERAGE: 10 * MIB}


class Blocks(nn.Module):
    """Ten linear layers of 1 MiB, each a block, without biases."""

    def __init__(self, classes: int = WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(10))
        self.head = nn.Linear(WIDTH, classes, bias=False)

    def features(self, inputs):
        return inputs

    def blocks(self):
        return list(self.layers)


class WithAdapters(Blocks):
    """The same, frozen, with a small matrix that is trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(8, WIDTH))


def situation(*overrides: str, model: nn.Module | None = None, modes: list[str] | None = None) -> Situation:
    config = compose.from_command_line([*runs.MODELS["gpt"], *overrides])
    checkpointing = dataclasses.replace(config.activation_checkpointing, modes=modes)
    config = dataclasses.replace(config, activation_checkpointing=checkpointing)
    return Situation(config, model or Blocks(), knows_loss=True)


def advice(shortage: Shortage, *overrides: str, **more) -> dict[str, int]:
    """The bytes saved by setting, in the advice's order."""
    return {advice.technique.setting: advice.saved_bytes for advice in advised(situation(*overrides, **more), shortage)}


def harmless(**held: int) -> Shortage:
    return Shortage({Category(name): size * MIB for name, size in held.items()})


# The order


def test_the_category_that_holds_the_most_comes_first():
    activations = advice(Shortage(FULL | {ACTIVATIONS: 80 * MIB}))
    assert next(iter(activations)) == "activation_checkpointing=full"
    assert activations["activation_checkpointing=full"] == 80 * MIB
    assert activations["precision=bf16"] == 40 * MIB - COPIES
    state = advice(Shortage(FULL))
    assert list(state)[:2] == ["precision=bf16_pure optimizer=adamw_bf16", "optimizer=adamw_4bit"]
    of_codes = 1 / 8 + 1 / 128  # with their scales, of a moment in fp32
    assert state["optimizer=adamw_4bit"] == pytest.approx(20 * MIB * (1 - of_codes), rel=0.01)
    average = advice(Shortage(FULL | {AVERAGE: 30 * MIB}), "train.ema=0.9")
    assert next(iter(average.items())) == ("train.ema=null", 30 * MIB)


@pytest.mark.parametrize("filled", [PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, AVERAGE])
def test_there_are_at_most_five_and_not_all_for_one_category(filled):
    found = advised(situation(), Shortage(FULL | {filled: 100 * MIB}))
    assert len(found) == MOST_ADVISED == 5
    categories = [one.category for one in found]
    assert max(map(categories.count, categories)) <= 3
    ranks = [one.sort_key for one in found]
    assert ranks == sorted(ranks)


def test_of_one_category_the_least_change_of_the_result_comes_first_and_of_like_ones_the_largest_saving():
    found = list(advice(harmless(optimizer_state=60), "train.ema=0.9"))
    assert found == [
        "optimizer=adamw_4bit",  # in place of adamw_bf16 and adamw_8bit
        "optimizer=sgd optimizer.momentum=0 optimizer.nesterov=false",  # in place of three others
        "adapter=lora",
    ]


def test_a_little_optimizer_state_is_no_reason_for_eight_optimizers():
    """2 of 60 MiB: what relieves it comes last, if at all."""
    held = {PARAMETERS: 50 * MIB, STATE: 2 * MIB, ACTIVATIONS: 8 * MIB}
    found = list(advice(Shortage(held, missing=25 * MIB), "adapter=lora", "train.ema=null", model=WithAdapters()))
    assert not any(setting.startswith(("optimizer=sgd", "optimizer=adamw")) for setting in found)
    found = list(advice(Shortage(held, missing=MIB), "adapter=lora", "train.ema=null", model=WithAdapters()))
    optimizers = [setting.startswith("optimizer=") for setting in found]
    assert any(optimizers)
    assert optimizers == sorted(optimizers)


def test_what_saves_a_small_part_of_what_is_missing_is_left_out():
    average = {AVERAGE: 10 * MIB}
    assert advice(Shortage(average, missing=100 * MIB), "train.ema=0.9") == {"train.ema=null": 10 * MIB}
    assert advice(Shortage(average, missing=101 * MIB), "train.ema=0.9") == {}


# Adapters


@pytest.mark.parametrize(
    ("precision", "setting", "saved"),
    [
        ("bf16", "adapter.base_dtype=bf16", 11 * MIB / 2 + COPIES),
        ("fp32", "adapter.base_dtype=bf16 precision=bf16", 11 * MIB / 2 + 4 * MIB),
    ],
)
def test_a_frozen_base_in_fp32_could_be_in_bf16(precision, setting, saved):
    shortage = harmless(parameters=11, activations=8)
    lora = ("adapter=lora", f"precision={precision}", "train.ema=null")
    found = advice(shortage, *lora, model=WithAdapters())
    assert next(iter(found.items())) == (setting, saved)
    assert "adapter.base_dtype" not in str(advice(shortage, f"precision={precision}", "train.ema=null"))
    in_bf16 = advice(shortage, *lora, model=WithAdapters().bfloat16())
    assert "adapter.base_dtype" not in str(in_bf16)


def test_adapters_save_gradients_and_state_of_what_they_do_not_train():
    found = advice(Shortage(FULL))
    adapters = 10 * 8 * 2 * WIDTH  # two matrices of rank 8 beside each linear layer of a block
    trained = 11 * WIDTH**2
    assert found["adapter=lora"] == int(30 * MIB * (1 - adapters / trained) - 4 * adapters)
    (technique,) = [one for one in TECHNIQUES if one.setting == "adapter=lora"]
    assert "another result: small matrices beside linear layers are trained" in technique.costs
    without_blocks = advice(Shortage(FULL), model=nn.Linear(WIDTH, WIDTH))
    assert "adapter=lora" not in without_blocks
    assert "adapter=lora" not in advice(Shortage(FULL), "adapter=lora", model=WithAdapters())


def test_adapters_as_large_as_the_layers_are_not_advised():
    facts = situation()
    config = dataclasses.replace(facts.config, adapter=dataclasses.replace(facts.config.adapter, rank=256))
    found = advised(dataclasses.replace(facts, config=config), Shortage(FULL))
    assert "adapter=lora" not in {advice.technique.setting for advice in found}


# What is in force


@pytest.mark.parametrize(
    ("overrides", "modes", "offered"),
    [
        ((), None, {"full", "selective", "auto"}),
        (("activation_checkpointing=selective",), None, {"full", "auto"}),
        (("activation_checkpointing=full",), None, set()),
        (("activation_checkpointing=auto",), ["full", "full"], set()),
        (("activation_checkpointing=auto",), ["full", "none"], {"full", "selective"}),
        (("activation_checkpointing=auto",), ["full", "selective"], {"full"}),
        (("activation_checkpointing=auto",), None, {"full", "selective"}),  # no plan has chosen
    ],
)
def test_checkpointing_whose_effect_is_in_force_is_not_offered(overrides, modes, offered):
    settings = [technique.setting for technique in available(situation(*overrides, modes=modes))]
    found = {setting.partition("=")[2] for setting in settings if setting.startswith("activation_checkpointing=")}
    assert found == offered


@pytest.mark.parametrize("mode", ["bf16", "bf16_pure", "fp16", "int8", "fp8"])
def test_16_bits_are_not_offered_where_matmuls_are_in_16_bits(mode):
    given = (f"precision={mode}", "train.ema=null", "optimizer=adamw_bf16")
    settings = {technique.setting for technique in available(situation(*given))}
    assert "precision=bf16" not in settings
    found = advice(Shortage(FULL), *given)
    assert "precision=bf16" not in found
    # Weights in bf16 save half of themselves and of their gradients, and copies, but no activations or state any more.
    saved = 10 * MIB
    if mode in ("bf16", "fp16"):
        saved += COPIES
    assert found.get("precision=bf16_pure optimizer=adamw_bf16", saved) == saved


# Estimates


def test_an_evaluation_is_not_helped_by_what_the_backward_needs():
    held = {ACTIVATIONS: 40 * MIB, PARAMETERS: 10 * MIB, STATE: 20 * MIB}
    assert "activation_checkpointing=full" in advice(Shortage(held))
    found = advice(Shortage(held, in_evaluation=True))
    assert found["precision=bf16"] == 20 * MIB - COPIES
    assert not any(setting.startswith(("activation_checkpointing", "memory.offload")) for setting in found)


def test_logits_are_saved_as_far_as_there_are_rows_for_several_chunks():
    rows, classes = 4096, 4 * WIDTH
    held = {ACTIVATIONS: 200 * MIB}
    wide = {"model": Blocks(classes)}
    saved = advice(Shortage(held, logit_rows=rows), **wide)["memory.loss_chunk=auto"]
    assert saved == (rows - rows // 4) * classes * 8  # logits and their gradient, in fp32
    in_evaluation = advice(Shortage(held, logit_rows=rows, in_evaluation=True), **wide)
    assert in_evaluation["memory.loss_chunk=auto"] == saved / 2
    assert "memory.loss_chunk=auto" not in advice(Shortage(held, logit_rows=100), **wide)
    few = advice(Shortage({ACTIVATIONS: MIB}, logit_rows=rows), **wide)
    assert few["memory.loss_chunk=auto"] == MIB


def test_what_was_asked_for_counts_where_the_technique_makes_it_smaller():
    found = advice(Shortage({ACTIVATIONS: 2 * MIB}, requested=16 * MIB))
    assert found["precision=bf16"] == 9 * MIB - COPIES
    assert found["activation_checkpointing=full"] == 2 * MIB
    more = advice(Shortage({STATE: 8 * MIB}, requested=40 * MIB), "train.ema=0.9")
    assert next(iter(more.items())) == ("precision=bf16", 20 * MIB - COPIES)
    assert "precision=bf16" not in advice(Shortage({STATE: 8 * MIB}))


def test_an_update_in_the_backward_spares_all_gradients_but_the_largest():
    clipped = "optimizer.in_backward=true train.grad_clip=null"
    held = {GRADIENTS: 11 * MIB}
    assert advice(Shortage(held))[clipped] == 10 * MIB
    assert clipped not in advice(Shortage(held, is_split=True))


def test_weights_whose_copies_exceed_the_activations_are_not_copied():
    held = {ACTIVATIONS: 2 * COPIES}
    assert "precision=bf16" not in advice(Shortage(held))
    assert advice(Shortage(held), model=WithAdapters().requires_grad_(False)).get("precision=bf16") == COPIES - MIB / 2
    tied = nn.Module()
    tied.embedding, tied.other = nn.Embedding(512, 512), nn.Embedding(512, 512)
    tied.head = nn.Linear(512, 512, bias=False)
    tied.head.weight = tied.embedding.weight
    assert advice(Shortage(held), model=tied)["precision=bf16"] == COPIES - MIB / 2
    assert advice(Shortage(held), "parallel=fsdp")["precision=bf16"] == COPIES


def test_temporaries_of_a_step_count_as_far_as_activations_leave_them_no_room(monkeypatch):
    """A piece of a weight has as many elements as a layer; the largest of them has 1 MiB."""
    four_bits = 60 * MIB * (1 - 1 / 8 - 1 / 128)
    held = {GRADIENTS: 11 * MIB, STATE: 60 * MIB}
    setting = "optimizer=adamw_4bit"
    assert advice(Shortage(held))[setting] == int(four_bits - 9.25 * MIB)
    assert advice(Shortage(held | {ACTIVATIONS: 4 * MIB}))[setting] == int(four_bits - 5.25 * MIB)
    assert advice(Shortage(held | {ACTIVATIONS: 10 * MIB}))[setting] == int(four_bits)
    assert advice(Shortage({STATE: 60 * MIB, ACTIVATIONS: 15 * MIB}))[setting] == int(four_bits - 5.25 * MIB)
    in_backward = ("optimizer.in_backward=true", "train.grad_clip=null")
    in_its_step = advice(Shortage({STATE: 60 * MIB, ACTIVATIONS: 30 * MIB}), *in_backward)
    assert in_its_step[setting] == int(four_bits - 9.25 * MIB)
    beside = advice(Shortage({STATE: 60 * MIB}), "optimizer=adamw_bf16")[setting]  # whose step has some
    assert beside == int(60 * MIB * (1 - 1 / 4 - 1 / 64) - 4 * MIB)
    monkeypatch.setattr(fused_adamw, "may_update_on", lambda device: True)  # one launch
    assert advice(Shortage(held))[setting] == int(four_bits)


def test_small_parameters_keep_their_state():
    small = nn.Linear(16, 16)
    temporaries = 16 * 16 * 4 * 5.25
    assert advice(harmless(optimizer_state=8), model=small)["optimizer=adamw_bf16"] == 4 * MIB - temporaries
    assert "optimizer=adamw_8bit" not in advice(harmless(optimizer_state=8), model=small)


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.setting)
def test_a_technique_saves_nothing_outside_of_the_categories_that_it_relieves(technique):
    facts = situation("optimizer=adamw", model=WithAdapters())
    savings = technique.savings(facts, Shortage(FULL, requested=MIB, logit_rows=4096))
    saved = {category for category, size in savings.items() if size > 0}
    assert saved <= technique.relieves
    assert savings or not technique.relieves
