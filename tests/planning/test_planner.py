"""The plan against real runs: equal to the byte, or a range that holds what is measured."""

import itertools
import random

import numpy as np
import pytest
import runs
import torch
from measured import by_part, own_model, peaks
from torch import nn

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.planning import planner

SIZES = ("batch.global_size=16", "batch.micro_size=8", "batch.eval_micro_size=8")
OVER = (*runs.TINY, "every.eval=1", "checkpointing=off", "oom.grow=false", "plan.levers=false")


def plan(*overrides):
    return planner.plan(compose.from_command_line([*OVER, *overrides]))[0]


def measure(run_dir, *overrides):
    return peaks(run_dir, *OVER, *overrides)


CASES = [
    *((model, (f"precision={mode}",)) for model in runs.MODELS for mode in ("fp32", "bf16", "fp16")),
    ("gpt", ("activation_checkpointing=full", "model.depth=2")),
    ("gpt", ("activation_checkpointing=selective", "precision=bf16")),
    ("gpt", ("train.ema=0.9", "optimizer.fused=false")),
    ("gpt", ("memory.loss_chunk=7", "model.context_length=32")),
    ("gpt", ("optimizer._target_=torch.optim.RMSprop", "~optimizer.betas", "~optimizer.eps", "precision=fp16")),
    ("gpt", ("optimizer._target_=torch.optim.NAdam", "~optimizer.betas", "~optimizer.eps")),  # its state comes late
    ("gpt", ("memory.loss_chunk=16", "data.vocab_size=512")),
    ("resnet", ("optimizer._target_=torch.optim.Rprop", "~optimizer.betas", "~optimizer.eps")),
    ("resnet", ("model.norm=group", "precision=bf16")),
    ("resnet", ("activation_checkpointing=full",)),
    ("mlp", ("optimizer=sgd", "train.grad_clip=null")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "more"), CASES)
def test_the_plan_is_what_a_run_measures(tmp_path, model, more):
    facts = plan(*runs.MODELS[model], *SIZES, *more)
    training, evaluation = measure(tmp_path, *runs.MODELS[model], *SIZES, *more)
    assert by_part(facts) == (training, evaluation)
    assert facts["peak_bytes"] == max(training, evaluation)
    assert facts["certainty"] == "exact" or facts["range_bytes"][0] <= facts["peak_bytes"]
    assert sum(facts["kinds"].values()) == facts["peak_bytes"] == max(facts["phases"].values())


def test_a_wider_model_is_another_plan(tmp_path):
    """The comparison above can fail."""
    facts = plan(*runs.MODELS["mlp"], *SIZES, "model.width=17")
    assert by_part(facts) != measure(tmp_path, *runs.MODELS["mlp"], *SIZES)


@pytest.mark.slow
def test_fixed_accumulation_cuts_as_the_run_does(tmp_path):
    overrides = (*runs.MODELS["gpt"], "accumulation.steps=3", "batch.eval_micro_size=8")
    assert by_part(plan(*overrides)) == measure(tmp_path, *overrides)


def test_kinds_and_the_binding_phase():
    """A wide model on one sample: the optimizer's and the gradients' share can be worked out by hand."""
    facts = plan("model=mlp", "data=digits", "model.width=512", "batch.micro_size=1", "batch.eval_micro_size=1")
    parameters = facts["static"]["parameters"]
    kinds = facts["kinds"]
    assert kinds["parameters"] == kinds["gradients"] == parameters
    assert 2 * parameters <= kinds["optimizer_state"] < 2 * parameters + 1000  # Adam's two moments, and step counts
    assert facts["binding_phase"] in ("backward", "clip", "optimizer_step")
    assert facts["phases"]["evaluation"] < facts["phases"]["backward"]


def test_a_large_batch_binds_in_its_activations_and_names_a_module():
    facts = plan(*runs.MODELS["gpt"], "model.context_length=64", "batch.global_size=64", "data.vocab_size=32")
    assert facts["binding_phase"] in ("forward", "backward")
    kinds = facts["kinds"]
    assert kinds["activations"] + kinds["temporaries"] > facts["peak_bytes"] / 2
    assert kinds["activations"] > 0
    assert facts["binding_module"].split(".")[0] in ("", "layers", "blocks", "norm", "head", "embedding")


def test_batches_of_different_lengths_give_a_range(tmp_path):
    overrides = (*runs.MODELS["gpt"], *SIZES, "data.min_length=4")
    facts = plan(*overrides)
    assert facts["certainty"] == "range"
    assert "differ in shape" in facts["notes"][0]
    low, high = facts["range_bytes"]
    assert low < high
    assert low <= max(measure(tmp_path, *overrides)) <= high


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, -1])
def test_the_largest_micro_batch_fits_and_one_more_does_not(tmp_path, spare):
    """spare: bytes beside what the size found at first needs."""
    overrides = (*runs.MODELS["gpt"], "batch.global_size=32", "every.eval=null", "train.grad_clip=null")
    needed = plan(*overrides, "batch.micro_size=10")["peak_bytes"]
    limit = f"memory.limit={needed + spare}"
    facts = plan(*overrides, limit)
    largest = facts["largest_micro_size"]
    assert largest >= 10 if spare == 0 else largest < 32
    assert facts["traces"] <= 6
    ended = runs.run(tmp_path / "fits", *OVER, *overrides, limit, f"batch.micro_size={largest}", "oom=off")
    assert ended.peak_memory_bytes <= needed + spare
    with pytest.raises(torch.OutOfMemoryError):
        runs.run(tmp_path / "fails", *OVER, *overrides, limit, f"batch.micro_size={largest + 1}", "oom=off")


@pytest.mark.slow
def test_without_a_given_size_the_plan_is_for_the_largest():
    overrides = (*runs.MODELS["mlp"], "batch.global_size=256", "model.width=64")
    limit = plan(*overrides, "batch.micro_size=100")["phases"]["backward"]
    facts = plan(*overrides, f"memory.limit={limit}")
    assert facts["micro_size"] == facts["largest_micro_size"] < 256
    assert facts["eval_micro_size"] == facts["largest_eval_micro_size"]
    assert facts["peak_bytes"] <= limit


def test_nothing_fits():
    facts = plan(*runs.MODELS["mlp"], "memory.limit=1KiB")
    assert facts["largest_micro_size"] == facts["largest_eval_micro_size"] == 0
    assert facts["peak_bytes"] > 1024


# Models that read values


class Branching(nn.Module):
    """Computes more where the batch's mean is positive."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.first, self.last = nn.Linear(64, 4096), nn.Linear(64, num_classes)

    def forward(self, inputs):
        inputs = inputs.flatten(1)
        extra = self.first(inputs).relu().mean() if inputs.mean() > self.bound else 0
        return self.last(inputs) + extra


class Often(Branching):
    bound = -1e9


class Never(Branching):
    bound = 1e9


class Drawing(Branching):
    """Leaves out a layer by chance, by Python's generator."""

    def forward(self, inputs):
        self.bound = 1e9
        inputs = inputs.flatten(1)
        return self.last(inputs) + (self.first(inputs).relu().mean() if random.random() < 0.5 else 0)


class DrawingItself(Branching):
    """The same by a generator of its own."""

    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.own = np.random.default_rng(0)

    def forward(self, inputs):
        inputs = inputs.flatten(1)
        return self.last(inputs) + (self.first(inputs).relu().mean() if self.own.random() < 0.5 else 0)


class DrawingByTorch(Branching):
    """By a generator of torch."""

    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.drawn = torch.Generator()

    def forward(self, inputs):
        return self.last(inputs.flatten(1)) * torch.rand((), generator=self.drawn)


class Counting(Branching):
    """Does more from a later step on."""

    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        inputs = inputs.flatten(1)
        return self.last(inputs) + (self.first(inputs).relu().mean() if self.calls > 20 else 0)


class CountingLater(Branching):
    """From an attribute that its first forward makes."""

    def forward(self, inputs):
        self.calls = getattr(self, "calls", 0) + 1
        return self.last(inputs.flatten(1))


class CountingInArray(Counting):
    def forward(self, inputs):
        self.calls = np.zeros(3) if isinstance(self.calls, int) else self.calls
        self.calls[0] += 1
        return self.last(inputs.flatten(1))


class CountingInList(Branching):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.losses = []

    def forward(self, inputs):
        self.losses.append(0.0)
        return self.last(inputs.flatten(1))


class CountingInClass(Branching):
    forwards = 0

    def forward(self, inputs):
        CountingInClass.forwards += 1
        return self.last(inputs.flatten(1))


class Holder:
    def __init__(self):
        self.own = random.Random(0)


class DrawingInObject(Branching):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.holder = Holder()

    def forward(self, inputs):
        return self.last(inputs.flatten(1)) * self.holder.own.random()


class Staged(Branching):
    stage = "warm"

    def forward(self, inputs):
        self.stage = f"after {self.stage}"
        return self.last(inputs.flatten(1))


class Iterating(Branching):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.turns = itertools.cycle([0, 0, 1])

    def forward(self, inputs):
        return self.last(inputs.flatten(1)) * next(self.turns)


class Remembering(Branching):
    """Keeps the features of evaluations."""

    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.seen = []

    def forward(self, inputs):
        inputs = inputs.flatten(1)
        if not self.training:
            self.seen.append(self.last(inputs))
        return self.last(inputs)


class Settling(Branching):
    """Keeps the same from its first step on."""

    def forward(self, inputs):
        self.shape, self.scale = inputs.shape, {"of": [1.0, None]}
        return self.last(inputs.flatten(1))


class Collecting(Branching):
    """Keeps what it has seen."""

    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes)
        self.register_buffer("seen", torch.zeros(0, 64), persistent=False)

    def forward(self, inputs):
        inputs = inputs.flatten(1)
        self.seen = torch.cat([self.seen, inputs.detach()])
        return self.last(inputs)


class Selecting(nn.Module):
    """The shape of an activation depends on values."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.last, self.wide = nn.Linear(64, num_classes), nn.Parameter(torch.ones(64))

    def forward(self, inputs):
        flat = inputs.flatten(1)
        return self.last(flat) + (flat[flat > 0.5][:, None] * self.wide).sum()


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Overrides for a model of this file."""
    return lambda kind: (*own_model(monkeypatch, tmp_path, kind), "data=digits", *SIZES)


@pytest.mark.parametrize("kind", [Often, Never])
def test_a_branch_on_a_value_gives_a_range_that_holds_both_ways(tmp_path, own, kind):
    facts = plan(*own(kind))
    assert facts["certainty"] == "range"
    assert any("values are read" in note for note in facts["notes"])
    low, high = facts["range_bytes"]
    assert high > low
    assert max(measure(tmp_path, *own(kind))) == (high if kind is Often else low)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Drawing, "the forward draws from Python's or NumPy's generator"),
        (DrawingItself, "the model counts or draws (own)"),
        (Counting, "the model counts or draws (calls)"),
        (CountingLater, "the model counts or draws (calls)"),
        (CountingInArray, "the model counts or draws (calls)"),
        (CountingInList, "the model counts or draws (len(model.losses), losses.2, losses.3)"),
        (CountingInClass, "the model counts or draws (CountingInClass.forwards)"),
        (DrawingInObject, "the model counts or draws (holder.own)"),
        (Staged, "the model counts or draws (stage)"),
        (Iterating, "the model counts or draws (turns)"),
        (Remembering, "evaluations keep tensors"),
        (Collecting, "buffers grow"),
    ],
)
def test_what_changes_from_step_to_step_is_not_called_exact(own, kind, reason):
    facts = plan(*own(kind))
    assert facts["certainty"] == "range"
    assert f"other steps may need more: {reason}" in facts["notes"]


def test_what_is_the_same_from_the_first_step_on_is_no_reason(tmp_path, own):
    facts = plan(*own(Settling))
    assert facts["certainty"] == "exact"
    assert by_part(facts) == measure(tmp_path, *own(Settling))


def test_generators_of_torch_are_no_reason(tmp_path, own):
    """What they draw is a tensor: to decide anything, it has to be read."""
    facts = plan(*own(DrawingByTorch))
    assert facts["certainty"] == "exact"
    assert by_part(facts) == measure(tmp_path, *own(DrawingByTorch))


def test_a_shape_that_depends_on_values_gives_a_range_and_the_operation_is_named(tmp_path, own):
    facts = plan(*own(Selecting))
    assert facts["certainty"] == "range"
    assert any("aten.index.Tensor" in note for note in facts["notes"])
    low, high = facts["range_bytes"]
    assert low < max(measure(tmp_path, *own(Selecting))) < high


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.world=2", "plan.world=2: parallel=single is one process"),
        ("train.compile=true", "train.compile=true: a compiled step cannot be planned"),
        ("model.width=0", "model.width=0: must be greater than 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(override, message):
    with pytest.raises(UserError, match=message):
        plan(*runs.MODELS["mlp"], override)
