"""Metrics of samples beside a count of something else: each is named before the first step; no other one is."""

import pytest
import runs
import torch
from helpers import evaluations
from torch.nn import functional as F

OWN = ("model=mlp", "~model.depth", "~model.dropout", "model._target_=own_tasks.Net", "model.width=16", "data=digits")
OWN = (*OWN, "user_packages=[own_tasks,test_divided_metrics]")
CLASS_WEIGHTS = {  # of the ten classes
    "integers": torch.arange(1.0, 11.0),
    "fractions": torch.linspace(0.05, 0.9, 10),  # the count is less than the number of samples
}


def weighted(model, batch, weights: str = "fractions", metric: str = "sum"):
    """A cross-entropy that is divided by the sum of the weights of the samples' classes, as in LDAM-DRW."""
    logits = model(batch["inputs"])
    targets = batch["targets"]
    by_class = CLASS_WEIGHTS[weights].to(logits.dtype)
    sample_weights = by_class[targets]
    is_right = logits.argmax(1) == targets
    values = {
        "sum": is_right.sum(),
        "of floats": is_right.float().sum(),
        "weighted": (is_right * sample_weights).sum(),
        "pair": (is_right.sum(), len(targets)),
        "of integers": is_right.long().sum().float(),
    }
    loss = F.cross_entropy(logits, targets, weight=by_class, reduction="sum")
    return loss, sample_weights.sum(), {"accuracy": values[metric]}


def ignoring(model, batch):
    """Counts the samples whose class is not the first; so does its accuracy."""
    logits = model(batch["inputs"])
    targets = batch["targets"]
    is_counted = targets > 0
    losses = F.cross_entropy(logits, targets, reduction="none")
    is_right = (logits.argmax(1) == targets) & is_counted
    return losses[is_counted].sum(), is_counted.sum(), {"accuracy": is_right.sum()}


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("weights", CLASS_WEIGHTS)
@pytest.mark.parametrize("metric", ["sum", "of floats", "of integers"])
def test_a_number_of_right_samples_that_is_divided_by_weights_is_named(tmp_path, caplog, weights, metric):
    task = f"task={{_target_: test_divided_metrics.weighted, weights: {weights}, metric: {metric}}}"
    runs.prepare(tmp_path, *OWN, task).close()
    (text,) = warnings_of(caplog)
    assert "weighted: the metric accuracy sums one value per sample, but is divided by the count, which is " in text


@pytest.mark.parametrize("metric", ["weighted", "pair"])
def test_a_metric_with_the_counts_weights_or_its_own_count_is_not(tmp_path, caplog, metric):
    runs.prepare(tmp_path, *OWN, f"task={{_target_: test_divided_metrics.weighted, metric: {metric}}}").close()
    assert warnings_of(caplog) == []


def test_nor_is_one_beside_a_count_of_the_samples_that_are_not_ignored(tmp_path, caplog):
    runs.prepare(tmp_path, *OWN, "task=test_divided_metrics.ignoring").close()
    assert warnings_of(caplog) == []


UNCHECKED = ("train.check_loss=false", "train.max_steps=60", "train.max_epochs=null", "every.eval=30")


def test_an_accuracy_above_1_is_named_after_an_evaluation(tmp_path, caplog):
    task = "task={_target_: test_divided_metrics.weighted, metric: sum}"
    runs.run(tmp_path, *OWN, *UNCHECKED, task, "optimizer.lr=0.01")
    assert evaluations(tmp_path)[-1]["accuracy"] > 1
    (text,) = [text for text in warnings_of(caplog) if "accuracy" in text]
    assert "the accuracy is " in text
    assert "return a tuple" in text


def in_percent(model, batch):
    loss, count, metrics = ignoring(model, batch)
    return loss, count, {"accuracy": 100 * metrics["accuracy"]}


@pytest.mark.parametrize("task", ["in_percent", "ignoring"])
def test_an_accuracy_in_percent_is_not(tmp_path, caplog, task):
    runs.run(tmp_path, *OWN, *UNCHECKED, f"task=test_divided_metrics.{task}", "optimizer.lr=0.01")
    assert [text for text in warnings_of(caplog) if "accuracy" in text] == []
