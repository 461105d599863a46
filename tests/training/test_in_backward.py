"""`optimizer.in_backward`: the same run, bit for bit, without the memory of all gradients at once."""

import pytest
import runs
import torch
from faults import Fault
from harness import Recorded
from helpers import metrics
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainapp.errors import TrainingStopped, UserError
from trainapp.memory.live_tensors import Category
from trainapp.optim.optimizers import require_separable
from trainapp.planning import planner
from trainapp.training import in_backward

PLAIN = ("train.grad_clip=null", "train.max_steps=3", "every.save=3")
ON = "optimizer.in_backward=true"
GPT = (*runs.MODELS["gpt"], "data.min_length=12")
CASES = {
    "resnet": runs.MODELS["resnet"],
    "gpt, whose head is tied and whose loss counts tokens": GPT,
    "average of the weights": (*GPT, "train.ema=0.9"),
    "two micro-batches": (*GPT, "batch.micro_size=9"),
    "checkpointing": (*GPT, "activation_checkpointing=full", "memory.loss_chunk=5"),
    "bf16 weights": (*GPT, "precision=bf16_pure", "optimizer=adamw_bf16"),
    "frozen": (*GPT, "model.freeze=[layers.0.mlp,norm]"),
}
LARGE = ("model=mlp", "data=digits")  # enough to be quantized
CASES |= {name: (*LARGE, f"optimizer={name}") for name in runs.options("optimizer")}


def ended(run_dir, *overrides):
    """The last checkpoint, and what was logged, without times and memory."""
    runs.run(run_dir, *PLAIN, *overrides)
    logged = [{name: line[name] for name in ("loss", "grad_norm", "lr")} for line in metrics(run_dir)]
    state = runs.saved(run_dir, 3)
    return {name: state[name] for name in ("model", "optimizer", "average", "progress")}, logged


QUICK = ("resnet", "checkpointing", "two micro-batches", "adamw", "adamw_4bit")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_the_run_is_the_same(tmp_path, case):
    after = ended(tmp_path / "after", *CASES[case])
    within = ended(tmp_path / "within", *CASES[case], ON)
    assert runs.differences(after, within) == []


def test_gradients_that_are_not_divided_are_noticed(tmp_path, monkeypatch):
    """Negative control of the equality."""
    after = ended(tmp_path / "after", *GPT)
    monkeypatch.setattr(in_backward, "count_factor", lambda *_: None)
    assert runs.differences(after, ended(tmp_path / "within", *GPT, ON))


def test_gradients_are_gone_from_the_peak(tmp_path):
    """Of large weights and few activations."""
    big = ("model=mlp", "model.width=512", "model.depth=6", "data=digits", "train.max_steps=2", *PLAIN[:1])
    gradients = runs.closed(tmp_path / "sizes", *big).meter.static[Category.GRADIENTS]
    peak = {}
    for name, own in {"after": (), "within": (ON,), "two micro-batches": (ON, "batch.micro_size=8")}.items():
        peak[name] = runs.run(tmp_path / name, *big, *own).peak_memory_bytes
    assert peak["after"] - peak["within"] > 0.7 * gradients  # the largest is a quarter of all
    assert peak["two micro-batches"] > peak["within"] + 0.5 * gradients  # as the run says
    assert runs.closed(tmp_path / "state", *big, ON).meter.static[Category.GRADIENTS] == 0


@pytest.mark.slow
def test_an_error_in_the_update_goes_back_to_the_checkpoint(tmp_path):
    """Its record says so; the rest is the run that was resumed from there with that size."""
    settings = (*GPT, ON, "every.save=2", "train.max_steps=4", "schedule=constant", *PLAIN[:1])
    failed = Recorded(runs.configure(tmp_path / "failed", *settings), Fault("backward after updates", 3, 4))
    (failure,) = failed.failures
    assert failure.recovery.action.startswith(
        "optimizer.in_backward=true has updated some of the parameters; restarting from the checkpoint of step 2"
    )
    runs.run(tmp_path / "again", *settings, "batch.micro_schedule={1: 16, 3: 8}")
    pair = [runs.saved(tmp_path / name, 4) for name in ("failed", "again")]
    assert runs.differences(*({part: state[part] for part in ("model", "optimizer")} for state in pair)) == []


def test_a_planned_peak_is_the_measured_one(tmp_path):
    settings = (*runs.MODELS["gpt"], ON, *PLAIN[:1], "train.max_steps=2", "batch.micro_size=16")
    planned, _ = planner.plan(runs.configure(tmp_path / "plan", *settings, "plan.techniques=false"))
    assert planned["peak_bytes"] == runs.run(tmp_path / "run", *settings).peak_memory_bytes


class Changing(nn.Module):
    """Uses a layer in the first of two micro-batches only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(64, 10), nn.Linear(64, 10), 0

    def forward(self, images):
        self.calls += 1
        return (self.first if self.calls % 2 else self.second)(images.flatten(1))


class Detached(nn.Module):
    """The gradient of the inner layer's input needs the outer weight after that has been updated."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, images):
        return self.outer(self.inner(images.flatten(1)) @ self.outer.weight.detach())[:, :10]


class Reentrant(nn.Module):
    """One layer in two of torch's reentrant checkpoints, each of which has a backward of its own."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images):
        x = images.flatten(1).requires_grad_()
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.head(x)


class Doubling(torch.optim.SGD):
    """Of a user."""


def own(model):
    return ("~model", f"+model._target_=test_in_backward.{model}", "user_packages=[test_in_backward]", "data=digits")


def test_a_parameter_without_a_gradient_in_the_last_micro_batch_is_updated(tmp_path):
    settings = (*own("Changing"), "batch.micro_size=8")
    assert runs.differences(ended(tmp_path / "a", *settings), ended(tmp_path / "b", *settings, ON)) == []


def test_a_parameter_that_is_needed_again_is_refused(tmp_path):
    ended(tmp_path / "after", *own("Detached"))
    with pytest.raises(UserError, match=r"optimizer.in_backward=true: the backward needs a parameter again after"):
        ended(tmp_path / "within", *own("Detached"), ON)


def test_gradients_in_several_parts_are_refused(tmp_path):
    with pytest.raises(TrainingStopped, match=r"in_backward=true, but the gradient of a parameter of shape \[64"):
        ended(tmp_path, *own("Reentrant"), ON)


def test_an_optimizer_of_ones_own_must_say_that_it_needs_one_gradient_at_a_time():
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UserError, match=r"optimizer.in_backward=true with Doubling: it is called once per parameter"):
        require_separable(Doubling(parameters))
    Doubling.updates_parameters_alone = True
    require_separable(Doubling(parameters))
