"""Metrics with a state: once per finished batch, undone with it, computed from all samples."""

import contextlib
import copy
import math

import own_hooks
import pytest
import runs
import torch
from helpers import evaluations, metrics, result

from trainapp.errors import UserError
from trainapp.hooks.metric_state import TorchMetric
from trainapp.hooks.metrics import StatefulMetrics, as_scalars
from trainapp.memory.live_tensors import Category
from trainapp.training import callback_calls, loop
from trainapp.training.evaluation.evaluate import evaluate
from trainapp.trials import metrics_trial

MLP = (*runs.MODELS["mlp"], "user_packages=[own_hooks]", "train.max_steps=2", "every.eval=2")
F1 = "+metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, average: macro}"
AUROC = "+metrics.auroc={_target_: torchmetrics.AUROC, task: multiclass}"  # keeps all predictions in lists


def own(kind, name="mine", **arguments):
    inner = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"+metrics.{name}={{_target_: own_hooks.{kind}{inner}}}"


def whole(run):
    """Logits and targets of the whole validation set, in one batch."""
    data = run.eval_sets[""].dataset
    batch = data.__getitems__(list(range(len(data))))
    run.state.model.eval()
    with torch.no_grad():
        return run.state.model(batch["inputs"]), batch["targets"]


def evaluated(tmp_path, *overrides):
    run = runs.prepare(tmp_path, *MLP, *overrides)
    try:
        evaluate(run)
        return run, evaluations(tmp_path)[-1], *whole(run)
    finally:
        run.close()


# Values


@pytest.mark.parametrize("size", ["7", "auto"])
def test_torchmetrics_from_all_samples(tmp_path, size):
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    members = "[{_target_: torchmetrics.classification.MulticlassRecall, num_classes: 10}]"
    collection = f"+metrics.all={{_target_: torchmetrics.MetricCollection, metrics: {members}}}"
    _, line, logits, targets = evaluated(tmp_path, F1, AUROC, collection, f"batch.eval_micro_size={size}")
    f1 = torchmetrics.F1Score(task="multiclass", average="macro", num_classes=10)(logits, targets)
    auroc = torchmetrics.AUROC(task="multiclass", num_classes=10)(logits, targets)
    assert line["f1"] == pytest.approx(float(f1), abs=1e-7)
    assert line["auroc"] == pytest.approx(float(auroc), abs=1e-6)
    recall = torchmetrics.classification.MulticlassRecall(10)(logits, targets)
    assert line["all/MulticlassRecall"] == pytest.approx(float(recall), abs=1e-6)
    assert abs(line["f1"] - line["accuracy"]) > 1e-3  # no mean of per-sample sums has the value


def test_perplexity_of_tokens(tmp_path):
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    chosen = (*runs.MODELS["gpt"], "model.dropout=0", "data.min_length=4", "batch.eval_micro_size=7")
    perplexity = "+metrics.perplexity={_target_: torchmetrics.text.Perplexity, ignore_index: -100}"
    runs.run(tmp_path, *chosen, perplexity, "every.eval=2", "train.max_steps=2", "objective=min perplexity")
    (line,) = evaluations(tmp_path)
    assert line["perplexity"] == pytest.approx(math.exp(line["loss"]), rel=1e-4)
    assert result(tmp_path)["objective"] == line["perplexity"]


@pytest.mark.parametrize("task", ["auto", "own_hooks.by_name"], ids=["positional", "keywords"])
def test_a_metric_of_ones_own_counts_every_sample_once(tmp_path, task):
    _, line, logits, targets = evaluated(tmp_path, own("Correct"), "batch.eval_micro_size=7", f"task={task}")
    right = int((logits.argmax(-1) == targets).sum())
    assert (line["mine/right"], line["mine/total"]) == (right, len(targets))
    assert line["mine/share"] == pytest.approx(right / len(targets))


# An error in an evaluation


def run_torn(tmp_path, *before, fails=True):
    """The result and the evaluation of a run one of whose metrics fails once, after those `before` it are updated."""
    own_hooks.TearsApart.has_failed = not fails
    ended = runs.run(tmp_path, *MLP, *before, own("TearsApart"), "batch.eval_micro_size=64")
    return ended, evaluations(tmp_path)[-1]


@pytest.mark.slow
def test_an_update_that_runs_out_of_memory_is_undone(tmp_path, monkeypatch):
    """The third batch of 64 is evaluated again as two of 32, and counts once; in the control, where nothing is undone,
    twice.
    """
    ended, line = run_torn(tmp_path / "undone")
    assert (ended.oom_restarts, line["mine/total"]) == (1, 360)
    assert line["mine/share"] == pytest.approx(line["accuracy"])
    monkeypatch.setattr(StatefulMetrics, "undone_on_error", lambda _: contextlib.nullcontext())
    assert run_torn(tmp_path / "not")[1]["mine/total"] == 360 + 64


def test_lists_and_tensors_of_torchmetrics_are_undone(tmp_path):
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    (torn, line), (_, whole) = (run_torn(tmp_path / str(fails), F1, AUROC, fails=fails) for fails in (True, False))
    assert torn.oom_restarts == 1
    assert (line["f1"], line["auroc"]) == (whole["f1"], whole["auroc"])


# Ranks, without processes


@pytest.mark.parametrize("uneven", [[5, 11], [16, 0]])
def test_declared_states_are_merged(uneven):
    """A rank without a sample has no zeros to add to a minimum or a correlation."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    torch.manual_seed(0)
    x, y = torch.randn(16), torch.randn(16)
    for make in (
        torchmetrics.R2Score,
        torchmetrics.PearsonCorrCoef,
        torchmetrics.SpearmanCorrCoef,
        torchmetrics.MeanSquaredError,
        lambda: torchmetrics.MetricCollection([torchmetrics.R2Score(), torchmetrics.MeanAbsoluteError()]),
    ):
        ranks = [TorchMetric(make(), "metrics.m") for _ in uneven]
        for held, ours, theirs in zip(ranks, x.split(uneven), y.split(uneven), strict=True):
            if len(ours):
                held.metric.update(ours, theirs)
        exported = [held.export_state() for held in ranks]
        own = copy.deepcopy(ranks[1].copy_state())
        found = ranks[1].compute(exported)
        assert not runs.differences([*map(list, own)], [*map(list, ranks[1].copy_state())])  # its own state stays
        assert ranks[1].metric.reset() is None  # a merged list is no list any more
        expected = make()
        expected.update(x, y)
        expected = expected.compute()
        for name, value in (expected if isinstance(expected, dict) else {"": expected}).items():
            merged = found[name] if isinstance(found, dict) else found
            assert float(merged) == pytest.approx(float(value), rel=1e-5), (make, name)


# What is logged


def test_numbers_of_what_metrics_compute():
    found = as_scalars(
        {
            "a": torch.tensor(0.5),
            "b": torch.tensor([1.0, 2.0]),
            "c": {"x": 1, "y": torch.tensor([3.0])},
            "matrix": torch.zeros(2, 2),
            "long": torch.zeros(101),
            "text": "words",
        }
    )
    assert found == {"a": 0.5, "b/0": 1.0, "b/1": 2.0, "c/x": 1.0, "c/y": 3.0}


def test_the_state_counts_as_memory(tmp_path):
    peaks = {}
    for kind in ("Unmergeable", "Large"):
        run = runs.prepare(tmp_path / kind, *MLP, own(kind), "batch.eval_micro_size=50")
        evaluate(run)
        run.close()
        peaks[kind] = run.memory.window()["memory/peak"]
    assert peaks["Large"] - peaks["Unmergeable"] == 2 * 2**20  # and the copy that undoes an update


def test_nothing_of_the_samples_stays_after_an_evaluation(tmp_path, monkeypatch):
    run = runs.prepare(tmp_path, *MLP, own("Keeps"), "batch.eval_micro_size=50")
    before, seen = sum(t.nbytes for t in run.metrics.tensors()), []
    monkeypatch.setattr(
        callback_calls, "call", lambda run, *_: seen.append(sum(t.nbytes for t in run.metrics.tensors()))
    )
    evaluate(run)
    run.close()
    assert seen == [before]
    assert sum(t.nbytes for t in run.metrics.tensors()) == before
    with run.memory.watch(run.meter.resident()):
        pass
    assert Category.KEPT not in run.memory.events([])[1].values()


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((own("Correct", name="loss"),), r"metrics\.loss: the log itself records this name"),
        ((own("Nothing"),), r"metrics\.mine: a Nothing has no method update and no method compute and no method reset"),
        (
            (own("Correct"), "task=own_hooks.silent"),
            r"metrics\.mine: the task of evaluations passes nothing to it; .*metrics\['mine'\]",
        ),
        (
            (own("Correct"), "task=own_hooks.own_sum"),
            r"metrics\.mine: the task returns a Tensor under metrics\['mine'\]",
        ),
    ],
)
def test_what_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message) as refused:
        runs.run(tmp_path, *MLP, *overrides)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "metrics.jsonl").exists()  # before training


def test_a_mistake_in_arguments_shows_before_training(tmp_path, monkeypatch):
    """Negative control: without the trial, at the first evaluation, with the same note."""

    def notes(run_dir):
        with pytest.raises(ValueError, match="expected logits") as failed:
            runs.run(tmp_path / run_dir, *MLP, own("OfThree"))
        return failed.value.__notes__[0]

    note = "in metrics.mine: update of a OfThree with what the task returns for it"
    assert notes("tried") == note
    assert not (tmp_path / "tried/metrics.jsonl").exists()
    monkeypatch.setattr(metrics_trial, "_try_on_examples", lambda run: set())
    assert notes("late") == note
    assert len(metrics(tmp_path / "late")) == 2
    with pytest.raises(KeyError, match="no such threshold") as failed:
        runs.run(tmp_path / "compute", *MLP, own("FailsLate"))
    assert failed.value.__notes__[0] == "in metrics.mine: compute of a FailsLate"


def test_the_trial_leaves_no_trace(tmp_path):
    """Bit for bit as without metrics, which are as new."""

    def trained(name, *metrics):
        run = runs.prepare(tmp_path / name, *MLP, "model.dropout=0.5", *metrics)
        assert all(held.metric.updates == 0 for held in run.metrics._wrappers.values())
        for _ in range(2):
            loop.train_step(run)
        run.close()
        return runs.weights(run.state.model)

    assert torch.equal(trained("a", own("Draws")), trained("b"))
