"""Counts that are sums of weights: loss, gradients and metrics are divided by the true count, and 0 is no step."""

import json
import logging
import math

import pytest
import runs
import torch
import weighted
from torch import nn

from trainapp.errors import TrainingStopped, UserError
from trainapp.training import engine, loop
from trainapp.training.engine import Totals
from trainapp.training.evaluation.evaluate import evaluate
from trainapp.training.evaluation.objective import record_objective

OVERRIDES = (
    *weighted.OVERRIDES,
    "task=weighted.task",
    "batch.micro_size=3",
    "train.ema=null",
    "train.max_steps=8",
    "optimizer.weight_decay=0.1",
)


@pytest.fixture
def prepare(prepare):
    """A run of OVERRIDES, and of those given."""
    return lambda *overrides: prepare(*OVERRIDES, *overrides)


def whole(run):
    """Loss and gradient of the next step as one batch with weights of about 1, by plain PyTorch."""
    largest = run.batches.dataset.weights.max()
    return runs.of_whole_batch(
        run, lambda model, batch: weighted.task(model, batch | {"weights": batch["weights"] / largest})
    )


@pytest.mark.parametrize(("task", "scale"), [("task", 1e-3), ("task", 1e-25), ("task", 1e10), ("as_numbers", 1e-8)])
def test_gradients_and_loss_are_divided_by_the_true_count(prepare, task, scale):
    run = prepare(f"task=weighted.{task}", f"+data.scale={scale}", "train.grad_clip=null")
    loss, expected = whole(run)
    totals = runs.accumulate(run)
    norm = run.engine.clip(totals)
    assert runs.relative_error(runs.gradients(run.state.model), expected) < 1e-5
    assert float(norm) == pytest.approx(float(expected.norm()), rel=1e-5)
    assert totals.means()["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_true_gradient_is_clipped(prepare):
    run = prepare("+data.scale=1e-25", "train.grad_clip=0.01")
    _, expected = whole(run)
    runs.clip(run)
    assert runs.relative_error(runs.gradients(run.state.model), expected * 0.01 / expected.norm()) < 1e-3


def test_a_count_of_at_least_one_would_be_noticed(prepare, monkeypatch):
    run = prepare("+data.scale=0.001", "train.grad_clip=null")
    _, expected = whole(run)
    factor = engine.count_factor
    monkeypatch.setattr(engine, "count_factor", lambda count, *rest: factor(count.clamp(min=1), *rest))
    runs.clip(run)
    assert runs.relative_error(runs.gradients(run.state.model), expected) > 0.5


def test_a_norm_in_fp32_would_be_noticed(prepare, monkeypatch):
    run = prepare("+data.scale=1e-25", "train.grad_clip=0.01")
    _, expected = whole(run)
    monkeypatch.setattr(engine, "may_be_extreme", lambda *_: False)
    assert float(runs.clip(run)) < 0.5 * float(expected.norm())  # its squares underflow


def test_evaluation_divides_by_the_true_count(prepare):
    run = prepare("+data.scale=1e-4", "batch.eval_micro_size=7")
    evaluate(run)
    (line,) = (run.tracker.run_dir / "evaluations.jsonl").read_text().splitlines()
    data = weighted.Vectors("val", scale=1e-4)
    run.state.model.eval()
    loss, count, metrics = weighted.task(run.state.model, data.__getitems__(range(len(data))))
    found = json.loads(line)
    assert found["loss"] == pytest.approx(float(loss.detach() / count), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(metrics["accuracy"] / count), rel=1e-5)


def indices_of(run, number):
    """The samples of a step from now."""
    progress = type(run.state.progress)()
    for _ in range(number - 1):
        run.batches.advance(progress)
    return run.batches.share(progress).numbers


def test_a_step_in_which_nothing_counts_changes_nothing(prepare, caplog):
    silent = [*indices_of(prepare(), 2), *indices_of(prepare(), 4)]
    run = prepare(f"+data.silent={silent}")
    loop.train_step(run)
    model = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in run.state.optimizer.state.values()]
    caplog.set_level(logging.INFO)
    loop.train_step(run)
    progress = run.state.progress
    assert (progress.step, progress.skipped, progress.consumed, progress.samples) == (1, 1, 32, 32)
    assert runs.differences(run.state.model.state_dict(), model) == []
    assert runs.differences([state["exp_avg"] for state in run.state.optimizer.state.values()], moments) == []
    loop.train(run)
    assert (progress.step, progress.skipped, progress.samples) == (8, 2, 160)
    said = [record.getMessage() for record in caplog.records if "count is 0" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("step 2: the loss's count is 0")
    assert all(torch.isfinite(tensor.float()).all() for tensor in run.state.model.state_dict().values())


def test_nothing_counts_in_some_micro_batches(prepare):
    silent = indices_of(prepare(), 1)[3:9]  # two whole micro-batches and more
    run = prepare(f"+data.silent={silent}", "train.grad_clip=null")
    loss, expected = whole(run)
    totals = runs.accumulate(run)
    run.engine.clip(totals)
    assert runs.relative_error(runs.gradients(run.state.model), expected) < 1e-5
    assert totals.means()["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (-2.5, r"step 1: the count is negative \(-2.5\)"),
        (math.nan, "the count is not finite"),
    ],
)
def test_a_count_that_cannot_be_is_an_error(prepare, count, message):
    run = prepare("batch.micro_size=16")
    run.engine.evaluated_task = lambda model, batch: (model(batch["inputs"]).sum(), torch.tensor(count), {})
    before = runs.weights(run.state.model)
    with pytest.raises(TrainingStopped, match=message):
        loop.train_step(run)
    assert torch.equal(runs.weights(run.state.model), before)


def test_an_evaluation_in_which_nothing_counts(prepare, caplog):
    run = prepare()
    run.engine.evaluated_task = lambda model, batch: (model(batch["inputs"]).sum() * 0, 0, {})
    with caplog.at_level(logging.INFO):
        evaluate(run)
    assert math.isnan(run.state.progress.objective)
    assert run.state.progress.best is None
    assert "evaluation at step 0: the loss's count is 0" in caplog.text


def test_an_objective_that_an_evaluation_does_not_have(prepare):
    run = prepare("objective=max third")
    run.state.progress.step = 1
    record_objective(run, {"loss": 1.0, "third": 0.5})
    record_objective(run, {"loss": 1.0})
    assert math.isnan(run.state.progress.objective)
    assert run.state.progress.best == 0.5
    with pytest.raises(UserError, match="there is no such metric"):
        record_objective(prepare("objective=max third"), {"loss": 1.0})


def test_a_metric_is_averaged_over_the_batches_that_have_it():
    totals = Totals()
    totals = totals.plus(torch.tensor(6.0), 2, {"always": torch.tensor(1.0), "first": torch.tensor(1.0)})
    totals = totals.plus(torch.tensor(0.0), 0, {})
    totals = totals.plus(torch.tensor(6.0), 4, {"always": torch.tensor(5.0), "later": torch.tensor(1.0)})
    totals = totals.plus(torch.tensor(9.0), 8, {"always": torch.tensor(8.0), "later": torch.tensor(5.0)}, real=False)
    assert totals.means() == {"loss": 2.0, "always": 1.0, "first": 0.5, "later": 0.25}


def test_a_metric_with_a_count_of_its_own_is_divided_by_it():
    """Also where it equals the loss's for a while."""
    two, six = torch.tensor(2.0), torch.tensor(6.0)
    totals = Totals()
    totals = totals.plus(six, 2, {"own": (two, torch.tensor(2)), "shared": two})
    totals = totals.plus(six, 4, {"own": (six, torch.tensor(2)), "shared": two})
    assert totals.means() == {"loss": 2.0, "own": 2.0, "shared": pytest.approx(4 / 6)}


class Doubles(nn.Module):
    """In fp64."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.linear = nn.Linear(64, num_classes, dtype=torch.float64)

    def forward(self, inputs):
        return self.linear(inputs.flatten(1).double())


def half_of_the_batch_counts(model, batch):
    losses = nn.functional.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
    return losses[::2].sum(), len(losses[::2]), {}


@pytest.mark.parametrize("counts", ["samples", "half"])
def test_gradients_of_an_fp64_model_are_divided_in_fp64(tmp_path, counts):
    """By 6, whose inverse in fp32 is off by 1e-8, and by a count that corrects it."""
    task = "classification" if counts == "samples" else "test_counts.half_of_the_batch_counts"
    own = (*runs.own_model("test_counts.Doubles"), "data=digits", "user_packages=[test_counts]", f"task={task}")
    sizes = ("batch.global_size=6", "batch.micro_size=6", "train.check_loss=false", "train.grad_clip=null")
    run = runs.closed(tmp_path, *runs.TINY, *own, *sizes)
    _, expected = runs.of_whole_batch(run, run.task)
    runs.clip(run)
    assert runs.relative_error(runs.gradients(run.state.model), expected) < 1e-14
