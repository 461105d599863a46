"""What a task, a model and a data set may bring: each works, or is refused with one message before any step is done."""

import contextlib
import re

import numpy as np
import own_tasks
import pytest
import runs
import torch
from helpers import evaluations, metrics
from torch import nn
from torch.nn import functional as F

from trainapp.data.sets.digits import Digits
from trainapp.errors import UserError
from trainapp.training import engine

PACKAGES = "user_packages=[own_models,own_tasks,test_tasks]"
OWN = (PACKAGES, "model._target_=own_tasks.Net", "~model.depth", "model.width=16", "data=digits")
MLP = ("model=mlp", *OWN)


def model_of(name, *arguments):
    return (*runs.own_model(name), *arguments, PACKAGES)


@pytest.mark.parametrize("task", ["reads_attributes", "calls_twice", "reads_a_blocks_weight", "with_frozen_parameters"])
def test_tasks_that_work(tmp_path, task):
    assert runs.run(tmp_path, *MLP, f"task=own_tasks.{task}", "batch.micro_size=6").steps == 4


def plain_metrics(model, batch):
    loss, count, _ = own_tasks.total(model, batch)
    return loss, count, {
        "a_float": 0.1 * count,
        "an_int": count,
        "a_bool": torch.ones((), dtype=torch.bool),
        "a_numpy_number": np.float32(0.5 * count),
        "an_array": np.array(0.25 * count),
        "called": lambda: 2.0 * count,
    }  # fmt: skip


def test_metrics_may_be_plain_numbers(tmp_path):
    settings = ("train.check_loss=false", "batch.micro_size=6", "every.eval=4")  # `a_bool` is no sum
    runs.run(tmp_path, *MLP, "task=test_tasks.plain_metrics", *settings)
    expected = {"a_float": 0.1, "an_int": 1, "a_numpy_number": 0.5, "an_array": 0.25, "called": 2}
    for line in (metrics(tmp_path)[-1], evaluations(tmp_path)[-1]):
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert metrics(tmp_path)[-1]["a_bool"] == pytest.approx(3 / 16)  # once per micro-batch


SEQUENCES = ("model=gpt", "model.width=16", "model.depth=1", "data=text", "data.context_length=16", PACKAGES)
SEQUENCES = (*SEQUENCES, "every.eval=4", "optimizer.lr=0.01")


@pytest.mark.parametrize("size", [5, 16])
def test_a_metric_of_samples_beside_a_loss_of_tokens_has_a_count_of_its_own(tmp_path, size):
    """All sequences have one length: the mean of their accuracies is that of all tokens."""
    runs.run(tmp_path, *SEQUENCES, "task=own_tasks.of_sequences", f"batch.micro_size={size}", "train.max_steps=4")
    for line in (metrics(tmp_path)[-1], evaluations(tmp_path)[-1]):
        assert line["accuracy"] > 0.01
        assert (line["share"], line["called"]) == pytest.approx((line["accuracy"], line["accuracy"]), rel=1e-6)


def test_a_metrics_own_count_must_add_up(tmp_path):
    text = runs.refusal(tmp_path, *SEQUENCES, "task={_target_: own_tasks.of_sequences, pair: one}")
    assert "own_tasks.of_sequences: the metric share (its count) is a mean, but a sum is required" in text


def warned(caplog):
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in texts if "sums one value per sample" in text]


def test_a_metric_of_samples_that_is_divided_by_tokens_is_named(tmp_path, caplog):
    """Sums add up over samples whatever they are divided by: such a metric was too small, silently."""
    run = runs.closed(tmp_path, *SEQUENCES, "task={_target_: own_tasks.of_sequences, pair: none}")
    (text,) = warned(caplog)
    assert text.startswith("task=own_tasks.of_sequences: the metric share sums one value per sample, but is divided by")
    assert "which is 64 for 4 samples" in text
    assert all(text.startswith("adds up over 4 samples") for name, text in run.checks.items() if "loss" in name)


@pytest.mark.parametrize(
    "overrides",
    [
        (*SEQUENCES, "task=own_tasks.of_sequences"),  # with its own count; beside it, the accuracy of tokens
        (*SEQUENCES, "task=own_tasks.sums_of_sums"),
        (*MLP, "task=own_tasks.total"),
    ],
)
def test_other_metrics_need_no_warning(tmp_path, caplog, overrides):
    runs.closed(tmp_path, *overrides)
    assert warned(caplog) == []


REFUSED = {  # results in a wrong form: test_loss_check.py
    "own_tasks.detached": r"task=own_tasks\.detached: its loss requires no gradient",
    "own_tasks.with_parameters": r"the loss depends on 1 parameters that are not among model\.parameters\(\) .*\[1\]",
}


@pytest.mark.parametrize("task", REFUSED)
def test_tasks_that_are_refused(tmp_path, task):
    assert re.search(REFUSED[task], runs.refusal(tmp_path, *MLP, f"task={task}"))


def test_without_the_check_foreign_parameters_are_never_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "checked_gradients", lambda *_: contextlib.nullcontext())
    assert runs.run(tmp_path, *MLP, "task=own_tasks.with_parameters").steps == 4
    assert float(own_tasks.with_parameters.scale) == 1
    own_tasks.with_parameters.zero_grad()


class Frozen(own_tasks.Net):
    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.requires_grad_(False)


class LazyButUnused(own_tasks.Lazy):
    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.spare = torch.nn.LazyLinear(3)


class Unregistered(torch.nn.Module):
    """The classic mistake: a plain list of layers."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = [torch.nn.Linear(64, 8)]
        self.head = torch.nn.Linear(8, num_classes)

    def forward(self, inputs):
        return self.head(self.layers[0](inputs.flatten(1)))


MODELS_REFUSED = {
    "own_tasks.InAList": r"model: InAList has no parameters, .*nn.ModuleList",
    "own_tasks.OwnTrain": r"model: it \(OwnTrain\) has a method train\(inputs.*replaces torch's train\(mode=True\)",
    "Frozen": r"model: Frozen has no parameter that requires a gradient",
    "LazyButUnused": r"model: the shapes of spare are lazy and a forward of the first two samples does not give them",
    "Unregistered": r"the loss depends on 2 parameters that are not among model\.parameters\(\)",
}


@pytest.mark.parametrize("name", MODELS_REFUSED)
def test_models_that_are_refused(tmp_path, name):
    target = name if "." in name else f"test_tasks.{name}"
    assert re.search(MODELS_REFUSED[name], runs.refusal(tmp_path, *model_of(target), "data=digits"))


def test_lazy_modules_get_their_shapes_from_the_data(tmp_path):
    chosen = (*model_of("own_tasks.Lazy"), "data=digits", "every.save=2")
    run = runs.closed(tmp_path / "run", *chosen)
    assert run.state.model.head.weight.shape == (10, 8)
    assert sum(len(group["params"]) for group in run.state.optimizer.param_groups) == 8
    assert runs.differences(*runs.resumed(tmp_path, 2, *chosen)) == []


def test_sparse_gradients_are_made_dense(tmp_path):
    ends = []
    for sparse in ("true", "false"):
        chosen = (*model_of("own_tasks.Sparse", f"+model.sparse={sparse}"), "data=digits")
        run = runs.run_until(tmp_path / sparse, 4, *chosen, "train.grad_clip=0.1", "batch.micro_size=6")
        ends.append(runs.weights(run.state.model))
    assert torch.equal(*ends)


def test_sparse_adam_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"optimizer\._target_=torch\.optim\.SparseAdam: takes sparse gradients only"):
        runs.run(tmp_path, *model_of("own_tasks.Sparse"), "data=digits", "optimizer._target_=torch.optim.SparseAdam")


def test_the_largest_seed(tmp_path):
    chosen = (*runs.MODELS["resnet"], f"train.seed={2**63 - 1}", "train.max_steps=1", "every.eval=1")
    assert runs.run(tmp_path, *chosen).steps == 1
    with pytest.raises(UserError, match=rf"^train\.seed={2**63}: must be less [a-z ]*\d+$"):
        runs.configure(tmp_path, f"train.seed={2**63}")


def test_a_model_of_ones_own_is_frozen_without_a_plus(tmp_path):
    run = runs.closed(tmp_path, *model_of("own_models.Normed"), "model.freeze=[body]")
    trained = {name for name, parameter in run.state.model.named_parameters() if parameter.requires_grad}
    assert trained == {"head.weight", "head.bias"}


class Wrong(Digits):
    task = "regression"


def test_a_wrong_task_of_a_data_set(tmp_path):
    wrong = r"^task=auto: test_tasks\.Wrong declares the task 'regression', which must be one of"
    with pytest.raises(UserError, match=wrong):
        runs.prepare(tmp_path, "model=mlp", PACKAGES, "data=digits", "data._target_=test_tasks.Wrong")


class Progressing(nn.Module):
    """The answers of docs/questions.md: a buffer that a callback sets."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.head = nn.Linear(64, num_classes)
        self.register_buffer("progress", torch.zeros(()))

    def forward(self, inputs):
        return self.head(inputs.flatten(1))


class Progress:
    def after_step(self, view):
        view.model.progress.fill_(view.step / view.length)


def of_progress(model, batch):
    logits = model(batch["inputs"])
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss, len(logits), {"progress": model.progress * len(logits)}


def with_gradients_of_inputs(model, batch):
    with torch.enable_grad():
        inputs = batch["inputs"].detach().requires_grad_()
        logits = model(inputs)
        (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), inputs, create_graph=model.training)
    loss = F.cross_entropy(logits, batch["targets"], reduction="sum")
    return loss + gradient.square().sum(), len(logits), {}


ANSWERS = (*runs.own_model("test_tasks.Progressing"), "data=digits", "user_packages=[test_tasks]")


def test_a_loss_knows_the_step_by_a_buffer_that_a_callback_sets(tmp_path):
    """Also in micro-batches and after a resume."""
    settings = (*ANSWERS, "task=test_tasks.of_progress", "+callbacks.progress={_target_: test_tasks.Progress}")
    settings = (*settings, "train.max_steps=4", "every.log=1", "every.save=1", "batch.micro_size=8")
    runs.run_until(tmp_path, 2, *settings)
    runs.run(tmp_path, *settings)
    assert [line["progress"] for line in metrics(tmp_path)] == [0, 0.25, 0.5, 0.75]


def test_a_loss_has_gradients_of_inputs_in_evaluations(tmp_path):
    result = runs.run(
        tmp_path, *ANSWERS, "task=test_tasks.with_gradients_of_inputs", "train.max_steps=2", "every.eval=2"
    )
    assert result.evaluation["loss"] > 0
