"""Metrics with a state: once per finished batch, undone with it, computed from all samples."""

import contextlib
import copy
import json
import math

import own_hooks
import pytest
import runs
import torch
from helpers import evaluations, result, run_cli

from trainapp.errors import UserError
from trainapp.hooks.metric_states import DeclaredStates
from trainapp.hooks.metrics import StatefulMetrics, as_scalars
from trainapp.parallel.ranks import SingleRank
from trainapp.train import evaluate
from trainapp.train.losses import classification

MLP = (*runs.MODELS["mlp"], "user_packages=[own_hooks]", "train.max_steps=2", "every.eval=2")
F1 = "+metrics.f1={_target_: torchmetrics.F1Score, task: multiclass, average: macro}"


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
        evaluate.evaluate(run)
        return run, evaluations(tmp_path)[-1], *whole(run)
    finally:
        run.close()


# Values


@pytest.mark.parametrize("size", ["7", "auto"])
def test_torchmetrics_from_all_samples(tmp_path, size):
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    auroc = "+metrics.auroc={_target_: torchmetrics.AUROC, task: multiclass}"  # keeps all predictions in lists
    _, line, logits, targets = evaluated(tmp_path, F1, auroc, f"batch.eval_micro_size={size}")
    f1 = torchmetrics.F1Score(task="multiclass", average="macro", num_classes=10)(logits, targets)
    auroc = torchmetrics.AUROC(task="multiclass", num_classes=10)(logits, targets)
    assert line["f1"] == pytest.approx(float(f1), abs=1e-7)
    assert line["auroc"] == pytest.approx(float(auroc), abs=1e-6)
    assert abs(line["f1"] - line["accuracy"]) > 1e-3  # no mean of per-sample sums has the value


def test_a_collection_gives_its_entries(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    members = ", ".join(
        f"{{_target_: torchmetrics.classification.Multiclass{kind}, num_classes: 10}}" for kind in ("F1Score", "Recall")
    )
    collection = f"+metrics.all={{_target_: torchmetrics.MetricCollection, metrics: [{members}]}}"
    _, line, logits, targets = evaluated(tmp_path, collection, "batch.eval_micro_size=50")
    recall = torchmetrics.classification.MulticlassRecall(10)(logits, targets)
    assert line["all/MulticlassRecall"] == pytest.approx(float(recall), abs=1e-6)
    assert "all/MulticlassF1Score" in line


def test_perplexity_of_tokens(tmp_path):
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    chosen = (*runs.MODELS["gpt"], "model.dropout=0", "data.min_length=4", "batch.eval_micro_size=7")
    perplexity = "+metrics.perplexity={_target_: torchmetrics.text.Perplexity, ignore_index: -100}"
    runs.run(tmp_path, *chosen, perplexity, "every.eval=2", "train.max_steps=2", "objective=min perplexity")
    (line,) = evaluations(tmp_path)
    assert line["perplexity"] == pytest.approx(math.exp(line["loss"]), rel=1e-4)
    assert result(tmp_path)["objective"] == line["perplexity"]


def test_a_metric_of_ones_own_counts_every_sample_once(tmp_path):
    _, line, logits, targets = evaluated(tmp_path, own("Correct"), "batch.eval_micro_size=7")
    right = int((logits.argmax(-1) == targets).sum())
    assert (line["mine/right"], line["mine/total"]) == (right, len(targets))
    assert line["mine/share"] == pytest.approx(line["accuracy"])


@pytest.mark.slow
def test_keyword_arguments_for_one_metric(tmp_path):
    _, line, _, targets = evaluated(tmp_path, own("Correct"), "task=own_hooks.by_name")
    assert line["mine/total"] == len(targets)


def test_a_second_evaluation_starts_afresh(tmp_path):
    runs.run(tmp_path, *MLP, own("Correct"), "train.max_steps=4", "every.eval=2")
    lines = evaluations(tmp_path)
    assert [line["mine/total"] for line in lines] == [360, 360]


# An error in an evaluation


def run_torn(tmp_path, **changes):
    own_hooks.TearsApart.has_failed = False
    ended = runs.run(tmp_path, *MLP, own("TearsApart"), "batch.eval_micro_size=64")
    return ended, evaluations(tmp_path)[-1]


@pytest.mark.slow
def test_an_update_that_runs_out_of_memory_is_undone(tmp_path):
    """The third batch of 64 is evaluated again as two of 32, and counts once."""
    ended, line = run_torn(tmp_path)
    assert ended.oom_restarts == 1
    assert line["mine/total"] == 360
    assert line["mine/share"] == pytest.approx(line["accuracy"])


@pytest.mark.slow
def test_without_undoing_it_the_batch_counts_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(StatefulMetrics, "undone_on_error", lambda _: contextlib.nullcontext())
    assert run_torn(tmp_path)[1]["mine/total"] == 360 + 64


def test_lists_and_tensors_of_torchmetrics_are_restored():
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    metrics = {
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=3),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=3),
    }
    held = StatefulMetrics(metrics)
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3), torch.randint(3, (8,))) for _ in range(3)]
    for number, batch in enumerate(batches):
        for attempt in (0, 1):
            try:
                with held.undone_on_error():
                    held.update({"*": batch})
                    if number == 1 and not attempt:
                        raise torch.OutOfMemoryError("a test")
                break
            except torch.OutOfMemoryError:
                pass
    found = held.results(SingleRank())
    logits, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert float(found["f1"]) == float(torchmetrics.F1Score(task="multiclass", num_classes=3)(logits, targets))
    assert float(found["auroc"]) == float(torchmetrics.AUROC(task="multiclass", num_classes=3)(logits, targets))


@pytest.mark.parametrize("name", ["Counting", "Buffered", "Holding"])
def test_attributes_beside_declared_states(name):
    """A count that is no state of torchmetrics stays for `compute`, and is undone with its batch."""
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    import own_torchmetrics

    held = StatefulMetrics({"m": getattr(own_torchmetrics, name)()})
    outputs, targets = torch.arange(10.0), torch.zeros(10)
    for _ in range(2):  # as in two evaluations
        held.reset()
        for batch in ((outputs[:6], targets[:6]), (outputs[6:], targets[6:])):
            with contextlib.suppress(torch.OutOfMemoryError), held.undone_on_error():
                held.update({"*": batch})
                raise torch.OutOfMemoryError("a test")
            with held.undone_on_error():
                held.update({"*": batch})
        for _ in range(2):  # it may be asked again
            found = as_scalars(held.results(SingleRank()))
            assert found == {"m/mean": 4.5, "m/count": 10.0, "m/batches": 2.0}


# Ranks, without processes


class Gathers(SingleRank):
    """Two ranks whose states are given."""

    world = 2

    def __init__(self, *by_rank):
        self.by_rank = list(by_rank)

    def all_gather_object(self, value):
        return self.by_rank.pop(0)


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
        ranks = [DeclaredStates(make(), "metrics.m") for _ in uneven]
        for held, ours, theirs in zip(ranks, x.split(uneven), y.split(uneven), strict=True):
            if len(ours):
                held.metric.update(ours, theirs)
        exported = [held.exported() for held in ranks]
        own = copy.deepcopy(ranks[1].take())
        found = ranks[1].merged(exported)
        assert not runs.differences([*map(list, own[0])], [*map(list, ranks[1].take()[0])])  # its own state stays
        assert ranks[1].metric.reset() is None  # a merged list is no list any more
        expected = make()
        expected.update(x, y)
        expected = expected.compute()
        for name, value in (expected if isinstance(expected, dict) else {"": expected}).items():
            merged = found[name] if isinstance(found, dict) else found
            assert float(merged) == pytest.approx(float(value), rel=1e-5), (make, name)


@pytest.mark.parametrize(("name", "attribute"), [("Counting", "count"), ("Holding", "count"), ("Buffered", "count")])
def test_attributes_beside_declared_states_are_not_merged(name, attribute):
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    import own_torchmetrics

    ranks = [DeclaredStates(getattr(own_torchmetrics, name)(), "metrics.m") for _ in range(2)]
    for held in ranks:
        held.metric.update(torch.arange(5.0), torch.zeros(5))  # as many on each: nothing to tell them apart
    with pytest.raises(UserError, match=f"metrics.m: on several ranks .*the attribute {attribute} of a {name}"):
        ranks[0].merged([held.exported() for held in ranks])


def test_what_a_metric_recognises_in_its_first_update_is_kept():
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    import own_torchmetrics

    ranks = [DeclaredStates(own_torchmetrics.Recognising(), "metrics.m") for _ in range(2)]
    ranks[1].metric.update(torch.arange(5.0), torch.zeros(5))
    exported = [held.exported() for held in ranks]
    assert [float(held.merged(exported)) for held in ranks] == [2.0, 2.0]
    ranks[0].metric.update(torch.zeros(5, dtype=torch.int64), torch.zeros(5))
    with pytest.raises(UserError, match="the attribute mode of a Recognising"):
        ranks[0].merged([held.exported() for held in ranks])


@pytest.mark.parametrize("kind", ["RunningMean", "RunningSum", "Running"])
def test_the_last_updates_are_no_samples(kind):
    """How many samples an update has depends on the memory."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    if kind == "Running":
        metric = torchmetrics.wrappers.Running(torchmetrics.MeanSquaredError())
    else:
        metric = getattr(torchmetrics.aggregation, kind)()
    with pytest.raises(UserError, match=f"metrics.m: a {kind} is of the last updates"):
        StatefulMetrics({"m": metric})


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


def test_nan_is_logged_as_such_and_never_the_best(tmp_path):
    ended = runs.run(tmp_path, *MLP, own("Fixed", value="nan"), "objective=max mine")
    text = (tmp_path / "evaluations.jsonl").read_text()
    assert json.loads(text)["mine"] is None
    assert json.loads(text)["mine_note"] == "nan"
    assert ended.objective_note == "nan at every evaluation"


def test_the_state_counts_as_memory(tmp_path):
    peaks = {}
    for kind in ("Unmergeable", "Large"):
        run = runs.prepare(tmp_path / kind, *MLP, own(kind), "batch.eval_micro_size=50")
        evaluate.evaluate(run)
        run.close()
        peaks[kind] = run.memory.window()["memory/peak"]
    assert peaks["Large"] - peaks["Unmergeable"] == 2 * 2**20  # and the copy that undoes an update


def test_nothing_of_the_samples_stays_after_an_evaluation(tmp_path, monkeypatch):
    run = runs.prepare(tmp_path, *MLP, own("Keeps"), "batch.eval_micro_size=50")
    before, seen = sum(t.nbytes for t in run.metrics.tensors()), []
    monkeypatch.setattr(
        evaluate.callbacks, "after_evaluation", lambda run, _: seen.append(sum(t.nbytes for t in run.metrics.tensors()))
    )
    evaluate.evaluate(run)
    run.close()
    assert seen == [before]
    assert sum(t.nbytes for t in run.metrics.tensors()) == before
    with run.memory.watch(run.meter.resident()):
        pass
    assert run.memory.kept_before == 0


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
        (
            ("+metrics.mine={_target_: own_hooks.Missing}",),
            r"metrics\.mine\._target_=own_hooks\.Missing: own_hooks has no",
        ),
        (("+metrics.mine={a: 1}",), r"metrics\.mine=\{'a': 1\}: must have a `_target_`"),
        (("+metrics.mine={_target_: os.system}",), r"metrics\.mine\._target_=os\.system: not among the packages"),
        ((own("Fixed"),), r"metrics\.mine\.value: required, but not set"),
    ],
)
def test_what_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message) as refused:
        runs.run(tmp_path, *MLP, *overrides)
    assert "\n" not in str(refused.value)


def test_arguments_that_a_metric_refuses(tmp_path):
    counts = "+metrics.mine={_target_: trainapp.hooks.confusion.Counts, num_classes: 3}"
    with pytest.raises(
        UserError, match=r"metrics\.mine: the update of a Counts fails on what .* \(float32 \[2, 10\], "
    ):
        runs.run(tmp_path, *MLP, counts)


def test_a_loss_in_chunks_has_no_logits_for_metrics(tmp_path):
    chosen = (*runs.MODELS["gpt"], "user_packages=[own_hooks]", own("Correct"), "memory.loss_chunk=16")
    with pytest.raises(UserError, match=r"memory\.loss_chunk=16 with metrics\.mine: metrics get logits"):
        runs.run(tmp_path, *chosen)


@pytest.mark.slow
def test_a_package_that_is_missing_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torchmetrics':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    import os

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_cli(*runs.MODELS["mlp"], F1, cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 2
    assert "metrics.f1._target_=torchmetrics.F1Score: needs torchmetrics" in done.stderr
    assert "pip install 'trainapp[metrics]'" in done.stderr


def test_a_task_without_metrics_is_as_it_was():
    """The built-in losses pass logits on, which nothing keeps where no metric is configured."""
    model = torch.nn.Linear(4, 3)
    _, count, metrics = classification(model, {"inputs": torch.randn(5, 4), "targets": torch.randint(3, (5,))})
    from trainapp.train.losses import evaluate_metrics

    assert set(evaluate_metrics(metrics)) == {"accuracy"}
    assert count == 5
