"""What a task, a model and a data set may bring: each works, or is refused with one message before any step is done."""

import contextlib
import re

import pytest
import runs
import torch
from helpers import evaluations, metrics

from trainapp.errors import UserError
from trainapp.training import engine

OWN = ("user_packages=[own_tasks]", "model._target_=own_tasks.Net", "~model.depth", "model.width=16", "data=digits")
MLP = ("model=mlp", *OWN)


def model_of(name, *arguments):
    keys = ("width", "depth", "dropout")
    return ("model=mlp", f"model._target_=own_tasks.{name}", *(f"~model.{key}" for key in keys), *arguments, OWN[0])


@pytest.mark.parametrize("task", ["reads_attributes", "calls_twice", "reads_a_blocks_weight", "with_frozen_parameters"])
def test_tasks_that_work(tmp_path, task):
    assert runs.run(tmp_path, *MLP, f"task=own_tasks.{task}", "batch.micro_size=6").steps == 4


def test_metrics_may_be_plain_numbers(tmp_path):
    runs.run(tmp_path, *MLP, "task=own_tasks.plain_metrics", "batch.micro_size=6", "every.eval=4")
    expected = {"a_float": 0.1, "an_int": 1, "a_numpy_number": 0.5, "an_array": 0.25, "called": 2}
    for line in (metrics(tmp_path)[-1], evaluations(tmp_path)[-1]):
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert metrics(tmp_path)[-1]["a_bool"] == pytest.approx(3 / 16)  # once per micro-batch


REFUSED = {
    "several_metrics": r"the task's metric right must be a scalar, the sum over the micro-batch, but has shape \[16\]",
    "text_metric": r"the task's metric name must be a number or a scalar tensor, not a str",
    "no_metrics": r"task=own_tasks\.no_metrics: its metrics must be a dict.*not a NoneType",
    "detached": r"task=own_tasks\.detached: its loss needs no gradient",
    "vector": r"task=own_tasks\.vector: its loss must be a scalar.*shape \[16\]; return loss\.sum\(\)",
    "number": r"task=own_tasks\.number: its loss must be a scalar tensor, not a float",
    "only_a_loss": r"task=own_tasks\.only_a_loss: must return \(loss_sum, count, metrics\), but returned a Tensor",
    "a_pair": r"task=own_tasks\.a_pair: must return \(loss_sum, count, metrics\), but returned 2 values",
    "with_parameters": r"the loss depends on 1 parameters that are not among model\.parameters\(\) \(of shape \[1\]\)",
    "uses_a_global_module": r"the loss depends on 1 parameters that are not .* \(of shape \[10, 10\]\)",
}


@pytest.mark.parametrize("task", REFUSED)
def test_tasks_that_are_refused(tmp_path, task):
    assert re.search(REFUSED[task], runs.refusal(tmp_path, *MLP, f"task=own_tasks.{task}"))


def test_without_the_check_foreign_parameters_are_never_trained(tmp_path, monkeypatch):
    import own_tasks

    monkeypatch.setattr(engine, "checked_gradients", lambda *_: contextlib.nullcontext())
    assert runs.run(tmp_path, *MLP, "task=own_tasks.with_parameters").steps == 4
    assert float(own_tasks.with_parameters.scale) == 1
    own_tasks.with_parameters.zero_grad()


MODELS_REFUSED = {
    "Frozen": r"model: Frozen has no parameter that requires a gradient",
    "LazyButUnused": r"model: the shapes of spare are lazy and a forward of the first two samples does not give them",
    "Unregistered": r"the loss depends on 2 parameters that are not among model\.parameters\(\)",
}


@pytest.mark.parametrize("name", MODELS_REFUSED)
def test_models_that_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=MODELS_REFUSED[name]) as refused:
        runs.run(tmp_path, *model_of(name), "data=digits")
    assert "\n" not in str(refused.value)


def test_lazy_modules_get_their_shapes_from_the_data(tmp_path):
    chosen = (*model_of("Lazy"), "data=digits", "every.save=2")
    run = runs.run_until(tmp_path / "a", 4, *chosen)
    assert run.state.model.head.weight.shape == (10, 8)
    assert sum(len(group["params"]) for group in run.state.optimizer.param_groups) == 8
    runs.run_until(tmp_path / "b", 2, *chosen)
    runs.run(tmp_path / "b", *chosen)
    for part in ("model", "optimizer"):
        assert runs.differences(runs.saved(tmp_path / "b", 4)[part], runs.saved(tmp_path / "a", 4)[part]) == []


@pytest.mark.parametrize("optimizer", [(), ("optimizer=sgd",)], ids=["adamw", "sgd"])
def test_sparse_gradients_are_made_dense(tmp_path, optimizer, caplog):
    ends = []
    for sparse in ("true", "false"):
        chosen = (*model_of("Sparse", f"+model.sparse={sparse}"), "data=digits", *optimizer)
        run = runs.run_until(tmp_path / sparse, 4, *chosen, "train.grad_clip=0.1", "batch.micro_size=6")
        ends.append(runs.weights(run.state.model))
    assert torch.equal(*ends)


def test_sparse_gradients_that_nothing_announces_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"the gradient of embedding\.weight is sparse.*use sparse=False"):
        runs.run(tmp_path, *model_of("Sparse", "+model.through=function"), "data=digits")


def test_sparse_adam_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"optimizer\._target_=torch\.optim\.SparseAdam: it cannot take a plain step"):
        runs.run(tmp_path, *model_of("Sparse"), "data=digits", "optimizer._target_=torch.optim.SparseAdam")


@pytest.mark.parametrize("seed", [2**63, 2**64, -1])
def test_seeds_out_of_range(tmp_path, seed):
    with pytest.raises(UserError, match=rf"^train\.seed={seed}: must be (less|greater) than [a-z ]*\d+$"):
        runs.configure(tmp_path, f"train.seed={seed}")


@pytest.mark.parametrize("model", runs.MODELS)
def test_the_largest_seed_trains_with_every_model(tmp_path, model):
    chosen = (*runs.MODELS[model], f"train.seed={2**63 - 1}", "train.max_steps=1", "every.eval=1")
    assert runs.run(tmp_path, *chosen).steps == 1
