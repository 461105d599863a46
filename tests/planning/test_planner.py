"""The plan against real runs: a trace is exact on the CPU, and the largest size is the largest."""

import functools
import random

import hf_files
import measured
import pytest
import runs
import torch
from torch import nn

from trainapp.config import compose
from trainapp.planning import fitting, planner

SIZES = ("batch.global_size=16", "batch.micro_size=8")
OVER = (*runs.TINY, "every.eval=null", "checkpointing=off", "oom.grow=false", "plan.techniques=false")
OWN = (*OVER, "data=digits", "model=mlp", "~model.width", "~model.depth", "~model.dropout")


def plan(*overrides):
    return planner.plan(compose.from_command_line([*OVER, *overrides]))[0]


def peak(run_dir, *overrides):
    return measured.peak(run_dir, *OVER, *overrides)


CASES = [
    *((model, (f"precision={mode}",)) for model in runs.MODELS for mode in ("fp32", "bf16", "fp16")),
    ("gpt", ("activation_checkpointing=full", "model.depth=2")),
    ("gpt", ("activation_checkpointing=selective", "precision=bf16")),
    ("gpt", ("train.ema=0.9", "optimizer.fused=false")),
    ("gpt", ("memory.loss_chunk=7", "model.context_length=32")),
    ("gpt", ("optimizer=adamw_8bit", "model.width=64")),
    ("gpt", ("optimizer._target_=torch.optim.NAdam", "~optimizer.betas", "~optimizer.eps")),  # its state comes late
    ("gpt", ("accumulation.steps=3", "batch.micro_size=auto")),
    ("resnet", ("model.norm=group", "precision=bf16")),
    ("resnet", ("activation_checkpointing=full",)),
    ("mlp", ("optimizer=sgd", "train.grad_clip=null")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "more"), CASES)
def test_a_trace_is_what_a_run_measures(tmp_path, model, more):
    facts = plan(*runs.MODELS[model], *SIZES, *more)
    rel = 0.01 if model == "resnet" else 0  # statistics of its norms in half precision
    assert facts["peak_bytes"] == pytest.approx(peak(tmp_path, *runs.MODELS[model], *SIZES, *more), rel=rel)
    assert (facts["method"], facts["margin"], facts["notes"]) == ("traced", 0.01, [])
    assert sum(facts["categories"].values()) == facts["peak_bytes"] == max(facts["phases"].values())


def test_a_wider_model_is_another_plan(tmp_path):
    """The comparison above can fail."""
    facts = plan(*runs.MODELS["mlp"], *SIZES, "model.width=17")
    assert facts["peak_bytes"] != pytest.approx(peak(tmp_path, *runs.MODELS["mlp"], *SIZES), rel=0.01)


def test_categories_and_the_phase_of_the_peak():
    """A wide model on one sample: the optimizer's and the gradients' share can be worked out by hand."""
    facts = plan("model=mlp", "data=digits", "model.width=512", "batch.micro_size=1")
    sizes = facts["categories"]
    assert sizes["parameters"] == sizes["gradients"]
    assert 2 * sizes["parameters"] <= sizes["optimizer_state"] < 2 * sizes["parameters"] + 1000  # and step counts
    assert facts["phase"] in ("backward", "clip", "optimizer_step")


def test_a_large_batch_needs_its_activations_and_names_a_module():
    facts = plan(*runs.MODELS["gpt"], "model.context_length=64", "batch.global_size=64", "data.vocab_size=32")
    assert facts["phase"] in ("forward", "backward")
    assert facts["categories"]["activations"] > facts["peak_bytes"] / 2
    assert facts["module"].split(".")[0] in ("", "layers", "blocks", "norm", "head", "embedding")


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, -1])
def test_the_largest_micro_batch_fits_and_one_more_does_not(tmp_path, spare):
    """spare: bytes beside what the size found at first needs."""
    overrides = (*runs.MODELS["gpt"], "batch.global_size=32", "train.grad_clip=null")
    needed = plan(*overrides, "batch.micro_size=10")["peak_bytes"]
    limit = f"memory.limit={needed + spare}"
    largest = plan(*overrides, limit)["largest_micro_size"]
    assert largest >= 10 if spare == 0 else largest < 32
    ended = runs.run(tmp_path / "fits", *OVER, *overrides, limit, f"batch.micro_size={largest}", "oom=off")
    assert ended.peak_memory_bytes <= needed + spare
    with pytest.raises(torch.OutOfMemoryError):
        runs.run(tmp_path / "fails", *OVER, *overrides, limit, f"batch.micro_size={largest + 1}", "oom=off")


def test_without_a_given_size_the_plan_is_for_the_largest():
    overrides = (*runs.MODELS["mlp"], "batch.global_size=256", "model.width=64")
    limit = plan(*overrides, "batch.micro_size=100")["phases"]["backward"]
    facts = plan(*overrides, f"memory.limit={limit}")
    assert facts["micro_size"] == facts["largest_micro_size"] < 256
    assert facts["peak_bytes"] <= limit


def test_nothing_fits():
    facts = plan(*runs.MODELS["mlp"], "memory.limit=1KiB")
    assert facts["largest_micro_size"] == 0
    assert facts["peak_bytes"] > 1024


# --- the search


def searched(peak_of, limit, top):
    """The largest size that the planner finds, and the sizes that it has asked for."""
    asked = []

    @functools.cache
    def peak(size):
        asked.append(size)
        return peak_of(size)

    return fitting.largest_size(peak, limit, top, 1), asked


@pytest.mark.parametrize("seed", range(100))
def test_the_size_found_fits_and_is_near_the_largest(seed):
    """A peak that is the highest of up to three affine functions of the size."""
    rng = random.Random(seed)
    top = rng.choice([1, 2, 7, 64, 1000, 5000])
    lines = [(rng.randint(1_000, 1_000_000), rng.randint(100, 100_000)) for _ in range(rng.randint(1, 3))]

    def peak_of(size):
        return max(fixed + slope * size for fixed, slope in lines)

    limit = rng.randint(peak_of(1) - 1000, peak_of(top) + 1000)
    found, asked = searched(peak_of, limit, top)
    assert len(asked) <= 11
    assert found == 0 or peak_of(found) <= limit
    assert found == top or peak_of(max(found + 1, int(found / 0.95) + 1)) > limit


def test_all_samples_at_once_may_fit_where_fewer_do_not():
    """They need no room for earlier gradients."""
    assert searched(lambda size: 900 if size == 64 else 500 + 10 * size, 900, 64) == (64, [64])


@pytest.mark.parametrize("name", ["Normed", "Refusing"])
def test_a_search_leaves_out_the_single_sample_that_a_model_refuses(name):
    model = (*OWN, "user_packages=[planned_models]", f"model._target_=planned_models.{name}")
    least = plan(*model, "batch.micro_size=3")["peak_bytes"]
    assert plan(*model, f"memory.limit={least}")["largest_micro_size"] == 3
    if name == "Normed":  # the smallest size is planned where none fits
        assert plan(*model, "memory.limit=1KiB")["micro_size"] == 2


# --- other models, metrics and tasks


class Draws(nn.Module):
    """Draws until its values fit, as `nn.init.trunc_normal_` does."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        while (self.layer.weight > 10).any():
            nn.init.normal_(self.layer.weight)

    def forward(self, inputs):
        return self.layer(inputs.flatten(1))


class Lazy(nn.Module):
    """Shapes from the data."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten())
        self.head = nn.LazyLinear(num_classes)

    def forward(self, inputs):
        return self.head(self.layers(inputs))


class Half(nn.Module):
    """Converts itself when built, has two names for one weight, and a GRU, which keeps its weights in a list."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(64, num_classes)
        self.second.weight = self.first.weight
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.bfloat16()

    def forward(self, inputs):
        hidden, _ = self.recurrent(self.second(self.first(inputs.squeeze(1).bfloat16())))
        return self.head(hidden.flatten(1)).float()


@pytest.mark.parametrize("kind", [Draws, Lazy, Half])
def test_models_that_fake_tensors_alone_cannot_build(tmp_path, kind):
    own = (*OWN, "user_packages=[test_planner]", f"model._target_=test_planner.{kind.__name__}", *SIZES)
    facts = plan(*own)
    assert facts["method"] == "traced"
    assert facts["peak_bytes"] == peak(tmp_path / "run", *own)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 128])
def test_a_step_on_embeddings_is_planned_with_all_its_micro_batches(tmp_path, size):
    """Their inputs and embeddings stay in memory."""
    chosen = (
        "model=mlp",
        "model.width=16",
        "data._target_=trainapp.data.sets.digits.DigitPairs",
        "batch.global_size=128",
    )
    chosen = (*chosen, f"batch.micro_size={size}")
    assert plan(*chosen)["peak_bytes"] == peak(tmp_path / "run", *chosen)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_llama_is_planned(tmp_path, monkeypatch, adapter):
    pytest.importorskip("transformers", reason="needs the extra trainapp[hf]")
    if adapter == "lora":
        pytest.importorskip("peft", reason="needs the extra trainapp[peft]")
        from trainapp.planning import traced

        monkeypatch.setattr(traced, "materialise", None)  # nothing is built for real: 8B would not fit
    tokens = ("data=synthetic_tokens", "data.vocab_size=64", "data.context_length=64", "data.size=64")
    chosen = (*hf_files.CAUSAL, *tokens, "data.val_size=16", f"adapter={adapter}", *SIZES)
    assert plan(*chosen)["peak_bytes"] == pytest.approx(peak(tmp_path / "run", *chosen), rel=0.01)
