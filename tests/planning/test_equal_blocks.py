"""Traces with a few of a model's equal blocks: what is extrapolated from them is what a trace of all blocks says."""

import hf_files
import pytest
import runs
import torch.nn.functional as F
from torch import nn

from trainapp.config import compose
from trainapp.planning import planner
from trainapp.planning.traced import FEW_BLOCKS, TracedEstimator

OVER = (*runs.TINY, "every.eval=null", "checkpointing=off", "oom.grow=false", "plan.techniques=false")
GPT = (*OVER, *runs.MODELS["gpt"], "model.depth=10", "batch.global_size=16")
TOKENS = ("data=synthetic_tokens", "data.vocab_size=64", "data.context_length=64", "data.size=64", "data.val_size=16")
LLAMA_CONFIG = hf_files.LLAMA.replace("num_hidden_layers: 2", "num_hidden_layers: 9")
LLAMA = (*OVER, "model=hf", "model.task=causal_lm", LLAMA_CONFIG, *TOKENS, "batch.global_size=16")
OWN = (*OVER, "data=digits", "~model.width", "~model.depth", "~model.dropout", "model=mlp")
SETTINGS = [
    (),
    ("precision=bf16",),
    ("activation_checkpointing=full",),
    ("activation_checkpointing=selective", "precision=bf16"),
    ("memory.loss_chunk=auto", "activation_checkpointing=full"),
    ("optimizer=adamw_8bit",),
    ("precision=bf16_pure", "optimizer=adamw_bf16"),
    ("adapter=lora",),
    ("adapter=lora", "precision=bf16", "activation_checkpointing=full", "memory.loss_chunk=auto"),
    ("optimizer.fused=false", "train.ema=0.9"),
    ("optimizer.in_backward=true", "train.grad_clip=null"),
]


def estimated(*overrides):
    """A traced estimator and the configuration."""
    config = compose.from_command_line(overrides)
    return planner.estimator_of(config, "traced"), config


@pytest.fixture
def traced_blocks(monkeypatch):
    """The number of blocks in each trace that is made; None: all."""
    traced = []
    full_peak = TracedEstimator.full_peak

    def recorded(self, config, size, blocks=None):
        traced.append(blocks)
        return full_peak(self, config, size, blocks)

    monkeypatch.setattr(TracedEstimator, "full_peak", recorded)
    return traced


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 2])
@pytest.mark.parametrize("more", SETTINGS, ids=" ".join)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_an_extrapolated_peak_is_that_of_all_blocks(traced_blocks, model, more, size):
    if model == "llama":
        pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
    if "adapter=lora" in more:
        pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
    estimator, config = estimated(*(GPT if model == "gpt" else LLAMA), *more)
    estimator.peak(config, 16)  # the first is a trace of all blocks
    extrapolated = estimator.peak(config, size)
    assert traced_blocks[:3] == [None, *FEW_BLOCKS]
    assert None not in traced_blocks[1:]
    full = estimator.full_peak(config, size)
    assert extrapolated.leaves_out_blocks
    assert extrapolated.total == pytest.approx(full.total, rel=0.001)
    assert extrapolated.phase == full.phase
    assert extrapolated.phases == pytest.approx(full.phases, rel=0.1)
    assert sum(extrapolated.categories.values()) == extrapolated.total
    few = estimator.full_peak(config, size, FEW_BLOCKS[1])
    assert few.total != pytest.approx(full.total, rel=0.03)  # the comparison can fail


@pytest.mark.slow
def test_a_peak_moves_with_the_number_of_blocks():
    """With few blocks the head binds, with many the gradients of all blocks: two lines are needed."""
    estimator, config = estimated(
        *GPT, "model.depth=40", "model.width=32", "data.vocab_size=4000", "activation_checkpointing=full",
        "model.context_length=8",
    )  # fmt: skip
    estimator.peak(config, 4)
    extrapolated, full = estimator.peak(config, 1), estimator.full_peak(config, 1)
    assert extrapolated.leaves_out_blocks
    assert extrapolated.total == pytest.approx(full.total, rel=0.001)


@pytest.mark.slow
def test_a_plan_traces_all_blocks_once_and_for_the_size_it_prints(traced_blocks):
    facts, breakdown = planner.plan(compose.from_command_line([*GPT, "memory.limit=1MiB"]))
    assert traced_blocks[:3] == [None, *FEW_BLOCKS]
    assert traced_blocks.count(None) == 2
    assert len(traced_blocks) > 6
    assert 0 < facts["largest_micro_size"] < 16
    assert breakdown.events  # for the picture: of the trace with all blocks
    config = compose.from_command_line([*GPT, "memory.limit=1MiB"])
    assert facts["peak_bytes"] == planner.estimator_of(config, "traced").peak(config, facts["micro_size"]).total


@pytest.mark.slow
def test_few_blocks_or_ranks_or_different_modes_are_traced_in_full(traced_blocks):
    for more in (
        ("model.depth=6",),
        ("activation_checkpointing=full", "activation_checkpointing.every=2"),
        ("activation_checkpointing=auto", f"activation_checkpointing.modes={['full'] * 5 + ['none'] * 5}"),
        ("parallel=ddp", "plan.world=2"),
    ):
        estimator, config = estimated(*GPT, *more)
        estimator.peak(config, 4)
        estimator.peak(config, 2)
        assert set(traced_blocks) == {None}, more


class Narrowing(nn.Module):
    """Blocks with equal parameters, on ever fewer features of a sample."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
        self.head = nn.LazyLinear(num_classes)

    def blocks(self):
        return list(self.layers)

    def forward(self, inputs):
        x = inputs.reshape(-1, 8, 8).repeat(1, 64, 1)
        for layer in self.layers:
            x = F.relu(layer(x))[:, ::2]
        return self.head(x.flatten(1))


class Block(nn.Module):
    """A block that has an index and a setting."""

    def __init__(self, index, kind):
        super().__init__()
        self.index, self.kind = index, kind
        self.layer = nn.Linear(64, 64)

    def forward(self, inputs):
        return self.layer(inputs) if self.kind == "linear" else self.layer(inputs).sin().cos()


class Kinds(nn.Module):
    """Blocks of one class, of which the last has another setting."""

    kinds = ("linear",) * 7 + ("waves",)

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layers = nn.ModuleList(Block(index, kind) for index, kind in enumerate(self.kinds))
        self.head = nn.Linear(64, num_classes)

    def blocks(self):
        return list(self.layers)

    def forward(self, inputs):
        x = inputs.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Alike(Kinds):
    """All blocks have the same setting."""

    kinds = ("linear",) * 8


class Counting(Alike):
    """Needs all of its blocks."""

    def forward(self, inputs):
        x = inputs.flatten(1)
        for index in range(8):
            x = self.layers[index](x)
        return self.head(x)


class WideBlock(Block):
    """Of three blocks, one needs six times the activations, by its index."""

    def __init__(self, index, kind):
        super().__init__(index, "wide")
        self.layer = nn.Linear(256, 256)

    def forward(self, inputs):
        x = self.layer(inputs)
        if self.index % 3 == 2:
            x = x.repeat(1, 6).sin().cos().reshape(len(x), 6, -1).mean(1)
        return inputs + x


class SomeWide(nn.Module):
    """Blocks of which some need more; of a single sample it is little beside the weights."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.stem = nn.Linear(64, 256)
        self.layers = nn.ModuleList(WideBlock(index, "wide") for index in range(9))
        self.head = nn.Linear(256, num_classes)

    def blocks(self):
        return list(self.layers)

    def forward(self, inputs):
        x = self.stem(inputs.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_first_trace_of_few_samples_does_not_hide_how_blocks_differ():
    model = (*OWN, "user_packages=[test_equal_blocks]", "model._target_=test_equal_blocks.SomeWide")
    estimator, config = estimated(*model, "batch.global_size=64", "batch.micro_size=1")
    full = estimator.peak(config, 1)
    assert estimator._extrapolated_peak(config, 1).total == pytest.approx(full.total, rel=0.01)
    _, checkpointed = estimated(*model, "batch.global_size=64", "activation_checkpointing=full")
    breakdown = estimator.peak(checkpointed, 64)
    assert not breakdown.leaves_out_blocks
    assert breakdown.total > 1.1 * estimator._extrapolated_peak(checkpointed, 64).total


@pytest.mark.parametrize(
    ("kind", "is_extrapolated"), [(Alike, True), (Kinds, False), (Counting, False), (Narrowing, False)]
)
def test_models_whose_blocks_cannot_be_left_out_are_traced_in_full(kind, is_extrapolated):
    model = (*OWN, "user_packages=[test_equal_blocks]", f"model._target_=test_equal_blocks.{kind.__name__}")
    estimator, config = estimated(*model, "batch.global_size=512")
    estimator.peak(config, 512)
    breakdown = estimator.peak(config, 256)
    assert breakdown.leaves_out_blocks == is_extrapolated
    assert breakdown.total == pytest.approx(estimator.full_peak(config, 256).total, rel=0)
