"""What a task or a forward changes beside tensors' contents: modes, flags, gradients; and names that the log needs."""

import own_tasks
import pytest
import runs
import torch
from helpers import metrics
from torch import nn

from trainapp.errors import UserError
from trainapp.losses.losses import RESERVED, evaluate_metrics
from trainapp.models.inspect import evaluation_mode
from trainapp.state.snapshot import Snapshot
from trainapp.training import loop
from trainapp.training.engine import gradients_with_versions, require_same_gradients

MLP = ("model=mlp", "data=digits", "batch.global_size=32", "batch.micro_size=16")


def attack(model, batch):
    """An adversarial example by the book: it takes gradients by `backward`, and clears those of the model."""
    inputs = batch["inputs"].clone().requires_grad_()
    nn.functional.cross_entropy(model(inputs), batch["targets"]).backward()
    model.zero_grad()
    logits = model((inputs + 0.1 * inputs.grad.sign()).detach())
    return nn.functional.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


def test_a_task_that_clears_gradients_is_refused(tmp_path):
    run = runs.prepare(tmp_path, *MLP)
    run.engine.evaluated_task = attack
    with pytest.raises(UserError, match=r"the task changes the gradients.*torch\.autograd\.grad"):
        loop.train_step(run)


def test_a_gradient_that_is_made_replaced_cleared_or_added_to_is_noticed():
    parameter = nn.Parameter(torch.ones(2))
    for gradient, after in ((None, torch.ones(2)), (torch.ones(2), None), (torch.ones(2), torch.ones(2))):
        parameter.grad = gradient
        before = gradients_with_versions([parameter])
        require_same_gradients([parameter], before)
        parameter.grad = after
        with pytest.raises(UserError):
            require_same_gradients([parameter], before)
    before = gradients_with_versions([parameter])
    parameter.sum().backward()  # adds in place
    with pytest.raises(UserError):
        require_same_gradients([parameter], before)


class AttackedLater(own_tasks.CountsCalls):
    """Calls backward() from the fourth step on."""

    def __call__(self, model, batch):
        inputs, targets = batch["inputs"], batch["targets"]
        if model.training:
            self.calls += 1
            if self.calls > 3:
                nn.functional.cross_entropy(model(inputs), targets).backward()
        return nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), len(inputs), {}


def test_a_backward_of_a_later_stage_is_refused(tmp_path):
    task = ("task=test_left_alone.AttackedLater", "user_packages=[test_left_alone]", "train.check_loss=false")
    refusal = runs.refusal(tmp_path, *MLP, *task, "train.max_steps=8", "every.eval=null")
    assert "the task changes the gradients of the model's parameters" in refusal


def attacked_evaluation(model, batch):
    """An attack in evaluations alone, as published code has it."""
    inputs, targets = batch["inputs"], batch["targets"]
    if not model.training:
        with torch.enable_grad():
            change = torch.zeros_like(inputs, requires_grad=True)
            nn.functional.cross_entropy(model(inputs + change), targets).backward()
        inputs = inputs + 0.1 * change.grad.sign()
    logits = model(inputs)
    right = (logits.argmax(1) == targets).sum()
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), len(logits), {"accuracy": right}


@pytest.mark.parametrize("check", ["true", "false"])
def test_a_backward_in_evaluations_does_not_train(tmp_path, check):
    """Nor one in a trial before the first step."""
    task = ("task=test_left_alone.attacked_evaluation", "user_packages=[test_left_alone]", f"train.check_loss={check}")
    norms = []
    for name, every in (("never", "every.eval=null"), ("often", "every.eval=2")):
        overrides = (*MLP, *task, every, "train.max_steps=6", "every.log=1", "batch.eval_micro_size=50")
        runs.run(tmp_path / name, *overrides)
        norms.append([line["grad_norm"] for line in metrics(tmp_path / name)])
    assert norms[0] == norms[1]


class Switching(nn.Module):
    """A forward that freezes its first layer and puts its BatchNorm into evaluation mode for good."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, inputs):
        self.norm.eval()
        self.first.requires_grad_(False)
        return self.norm(self.first(inputs))


def test_modes_and_frozen_parameters_are_restored():
    model = Switching()
    point = Snapshot({"": model})
    point.take()
    model(torch.randn(4, 2))
    point.restore()
    assert model.norm.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(torch.randn(4, 2))
    point.take()
    model.train()
    model.requires_grad_(True)
    point.restore()
    assert (model.training, model.norm.training) == (True, False)
    assert not any(parameter.requires_grad for parameter in model.first.parameters())


def test_evaluation_leaves_every_module_in_its_own_mode():
    model, loss = Switching(), nn.Dropout()
    model.norm.eval()
    with evaluation_mode((model, loss)):
        assert not any(module.training for module in (*model.modules(), loss))
    assert (model.training, model.norm.training, loss.training) == (True, False, True)


class Sampling(nn.Sequential):
    """Monte Carlo dropout: it stays on (Gal and Ghahramani 2016)."""

    def train(self, mode=True):
        super().train(mode)
        self[0].train()
        return self


def test_a_train_of_the_users_own_decides_in_evaluation_too():
    model = nn.Sequential(Sampling(nn.Dropout()), nn.Dropout())
    with evaluation_mode((model,)):
        assert [module.training for module in model.modules()] == [False, False, True, False]
    assert all(module.training for module in model.modules())


def test_metrics_cannot_take_the_names_of_the_log():
    for name in RESERVED:
        assert evaluate_metrics({f"{name}_own": torch.tensor(1.0)})
        with pytest.raises(UserError, match=f"a metric cannot be called {name}"):
            evaluate_metrics({name: torch.tensor(1.0)})


def test_the_names_of_the_log_are_reserved(tmp_path):
    run = runs.run(tmp_path, *MLP, "every.log=1")
    assert run.steps
    (line, *_) = metrics(tmp_path)
    plain = {name for name in line if "/" not in name}
    assert plain - {"accuracy", "loss_scale"} <= RESERVED


class ReplayBuffer:
    """No module, no state dict."""

    def __init__(self):
        self.data = []


HELD_GLOBALLY = ReplayBuffer()
LENGTHS: list[tuple[int, int, int]] = []


class Replays:
    """A task that keeps what it has seen: in an object that it holds, in a list, and in a global object."""

    def __init__(self):
        self.buffer = ReplayBuffer()
        self.seen = []

    def __call__(self, model, batch):
        logits = model(batch["inputs"])
        if len(logits) == 16:  # a step, not a trial
            LENGTHS.append((len(self.buffer.data), len(self.seen), len(HELD_GLOBALLY.data)))
        self.buffer.data.append(logits.detach())
        self.seen.append(len(logits))
        HELD_GLOBALLY.data.append(len(logits))
        return torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


@pytest.mark.parametrize("checks", ["true", "false"])
def test_trials_fill_no_replay_buffer(tmp_path, checks):
    LENGTHS.clear()
    HELD_GLOBALLY.data.clear()
    own = ("model=mlp", "model.width=16", "data=digits", "user_packages=[test_left_alone]")
    task = ("task=test_left_alone.Replays", f"train.check_loss={checks}", "every.eval=null", "batch.micro_size=16")
    runs.run(tmp_path, *runs.TINY, *own, *task, "train.max_steps=2", "oom.grow=false")
    assert LENGTHS == [(0, 0, 0), (1, 1, 1)]
