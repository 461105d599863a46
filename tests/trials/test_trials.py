"""Trial calls leave no trace in the model, whatever it shares with its copies, and may need gradients."""

import gc
import json
import queue
import re
import weakref

import pytest
import runs
import test_recorded_checks
import torch
from torch import nn

from trainapp.trials import probe

HERE = "user_packages=[own_tasks,test_trials]"
SUM, MEAN = "task=own_tasks.total", "task=own_tasks.mean"


def own_model(name):
    return (*runs.own_model(f"test_trials.{name}"), HERE, "data=digits", "train.max_steps=2")


# --- models that share modules with their copies


class PartlyInClosure(nn.Module):
    """As in makemore and minGPT: a function in an attribute holds a part of the model, which a copy then shares."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.layers = nn.ModuleDict({"norm": nn.LayerNorm(16), "head": nn.Linear(16, num_classes)})
        layers = self.layers
        self.classify = lambda features: layers.head(layers.norm(features))

    def forward(self, inputs):
        return self.classify(self.body(inputs))


class WhollyInClosure(PartlyInClosure):
    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.classify = lambda inputs: self.layers.head(self.layers.norm(self.body(inputs)))

    def forward(self, inputs):
        return self.classify(inputs)


class Frozen(nn.Sequential):
    """Its author saves memory: copies are the module itself."""

    def __deepcopy__(self, memo):
        return self


class RegisteredAsItself(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.teacher = Frozen(nn.Flatten(), nn.Linear(64, 16))
        self.head = nn.Linear(16, num_classes)

    def forward(self, inputs):
        return self.head(self.teacher(inputs))


class Tokens(nn.Module):
    """Embeddings take integers, so that a conversion to fp64 would train on without an error."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(17, 8), nn.Flatten(), nn.Linear(512, num_classes))
        layers = self.layers
        self.classify = lambda tokens: layers(tokens)

    def forward(self, inputs):
        return self.classify((inputs.flatten(1) * 3).long().clamp(0, 16))


@pytest.mark.parametrize("name", ["PartlyInClosure", "WhollyInClosure", "RegisteredAsItself", "Tokens"])
def test_a_model_that_its_copy_shares_is_not_converted(tmp_path, name):
    run = runs.closed(tmp_path, *own_model(name), SUM)
    assert {parameter.dtype for parameter in run.state.model.parameters()} == {torch.float32}
    for mode in ("loss", "loss in training"):
        shared = (
            r"adds up over 4 .*, in fp32; not in fp64: Error: the copy shares model\.\S+ \(\w+\), such as by a closure"
        )
        assert re.match(shared, run.checks[mode])


@pytest.mark.parametrize("name", ["PartlyInClosure", "Tokens"])
def test_it_trains_as_if_it_had_not_been_checked(tmp_path, name):
    """With an error in a part in fp64 beside others in fp32, and without one where all is in fp64."""
    for value in ("true", "false"):
        runs.run(tmp_path / value, *own_model(name), SUM, f"train.check_loss={value}")
    assert runs.differences(*(runs.saved(tmp_path / value, 2) for value in ("true", "false"))) == []
    assert "the loss is a mean" in runs.refusal(tmp_path, *own_model(name), MEAN)


class WithSharedActivation(nn.Module):
    """What is shared has no tensors, so nothing keeps the copy from fp64."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layer, self.activation = nn.Linear(64, num_classes), nn.Tanh()
        activation = self.activation
        self.activate = lambda values: activation(values)

    def forward(self, inputs):
        return self.activate(self.layer(inputs.flatten(1)))


def test_a_shared_module_without_tensors_is_compared_in_fp64(tmp_path):
    told = test_recorded_checks.checks_of(tmp_path, *own_model("WithSharedActivation"), SUM)
    assert told["loss"] == test_recorded_checks.IN_DOUBLE


# --- tasks that need gradients


class Critic(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs):
        return self.layers(inputs)


class LazyCritic(Critic):
    """Shapes from the data."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1))


# A list would be put back after each trial.
PENALTIES: "queue.SimpleQueue[weakref.ref[torch.Tensor]]" = queue.SimpleQueue()


def penalties(model, images):
    """Of each sample (Gulrajani et al. 2017)."""
    images = images.clone().requires_grad_()
    values = model(images)
    (gradients,) = torch.autograd.grad(values, images, torch.ones_like(values), create_graph=True)
    result = (gradients.flatten(1).norm(dim=1) - 1).square()
    PENALTIES.put(weakref.ref(result))
    return result


def with_sum(model, batch):
    images = batch["inputs"]
    return model(images).sum() + 10 * penalties(model, images).sum(), len(images), {}


def with_mean(model, batch):
    images = batch["inputs"]
    return model(images).sum() + 10 * penalties(model, images).mean(), len(images), {}


def with_backward(model, batch):
    """Adds to parameters' gradients, as no task should."""
    loss, count, metrics = with_sum(model, batch)
    loss.backward(retain_graph=True)
    return loss, count, metrics


def distance(model, batch):
    return model(batch["inputs"]).square().sum(), len(batch["inputs"]), {}


def updates(task):
    update = f"{{name: critic, task: test_trials.{task}, parameters: [layers.*]}}"
    return ("task=test_trials.distance", f"updates=[{update}]")


NOT_IN_EVALUATION = "not compared: RuntimeError: element 0 of tensors does not require grad"


def test_a_penalty_that_is_a_sum_passes(tmp_path):
    told = test_recorded_checks.checks_of(tmp_path, *own_model("Critic"), *updates("with_sum"))
    assert set(told.values()) == {test_recorded_checks.IN_DOUBLE, "none"}
    told = test_recorded_checks.checks_of(tmp_path, *own_model("Critic"), "task=test_trials.with_sum")
    assert told["loss in training"] == test_recorded_checks.IN_DOUBLE
    assert told["draws in training"] == "none"
    assert told["loss"].startswith(NOT_IN_EVALUATION)  # in which it would fail, too


@pytest.mark.parametrize("arguments", [updates("with_mean"), ("task=test_trials.with_mean",)], ids=["update", "task"])
def test_a_penalty_that_is_a_mean_is_refused(tmp_path, arguments):
    message = runs.refusal(tmp_path, *own_model("Critic"), *arguments)
    assert "test_trials.with_mean: the loss is not a sum over samples" in message
    assert "The task computes gradients itself (torch.autograd.grad or backward())" in message


@pytest.mark.parametrize("task", ["with_sum", "with_backward"])
def test_trials_with_gradients_leave_nothing(tmp_path, monkeypatch, task):
    monkeypatch.setattr(probe, "MAX_COPIED_BYTES", 0)  # of the model itself
    while not PENALTIES.empty():
        PENALTIES.get()
    gc.disable()  # nothing waits for it
    try:
        run = runs.closed(tmp_path, *own_model("Critic"), *updates(task))
        penalties = [PENALTIES.get() for _ in range(PENALTIES.qsize())]
        remaining = [penalty for penalty in penalties if penalty() is not None]
    finally:
        gc.enable()
    assert len(penalties) >= 6
    assert not remaining
    assert "in fp32" in run.checks["loss of update critic in training"]
    assert all(parameter.grad is None for parameter in run.state.model.parameters())


@pytest.mark.parametrize("task", ["with_sum", "with_backward"])
def test_lazy_modules_get_their_shapes_from_a_task_that_needs_gradients(tmp_path, task):
    run = runs.closed(tmp_path, *own_model("LazyCritic"), *updates(task))
    assert run.state.model.layers[1].weight.shape == (16, 64)
    assert all(parameter.grad is None for parameter in run.state.model.parameters())


# --- models with methods of their own


class Learner(nn.Module):
    """As in MAML-Pytorch: `parameters()` takes no argument, and returns the list of them."""

    def __init__(self, num_classes: int):
        super().__init__()
        weight = nn.Parameter(0.1 * torch.ones(num_classes, 64))
        self.fast_weights = nn.ParameterList([weight, nn.Parameter(torch.zeros(num_classes))])

    def forward(self, inputs):
        return nn.functional.linear(inputs.flatten(1), *self.fast_weights)

    def parameters(self):
        return self.fast_weights


def test_a_model_whose_parameters_are_no_iterator_trains(tmp_path):
    result = runs.run(tmp_path, *own_model("Learner"), "checkpointing=off")
    assert result.steps == 2
    checks = json.loads((tmp_path / "recipe.json").read_text())["checks"]
    assert "in fp64, with noise too" in checks["loss in training"]
