"""Callbacks: once per committed step, never in a retried one, and nothing of theirs reaches the run."""

from types import SimpleNamespace

import own_hooks
import pytest
import runs
import torch
from helpers import _events, evaluations, metrics, result, texts

from trainapp.errors import TrainingStopped, UserError
from trainapp.files import json_lines
from trainapp.hooks.callbacks import Callbacks, EarlyStopping
from trainapp.training import callback_calls, reporting
from trainapp.training.engine import Engine
from trainapp.training.evaluation import evaluate

MLP = (*runs.MODELS["mlp"], "model.dropout=0.1", "user_packages=[own_hooks]")


def own(kind, name="mine", **arguments):
    inner = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"+callbacks.{name}={{_target_: own_hooks.{kind}{inner}}}"


@pytest.fixture(autouse=True)
def nothing_seen():
    own_hooks.SEEN.clear()


def steps():
    return [call[1] for call in own_hooks.SEEN if call[0] == "step"]


# When


def test_every_moment_once(tmp_path):
    runs.run(tmp_path, *MLP, own("Records"), "every.eval=2")
    assert [call[:2] for call in own_hooks.SEEN] == [
        *[("step", 1), ("step", 2), ("evaluation", 2)],
        *[("step", 3), ("step", 4), ("evaluation", 4), ("end", 4)],
    ]
    assert own_hooks.SEEN[0] == ("step", 1, 16, False)
    assert set(own_hooks.SEEN[2][2]) == {"loss", "accuracy"}


@pytest.mark.slow
def test_not_for_a_retried_step(tmp_path, monkeypatch):
    """Memory runs out in the second step, and in the log of the third, which is committed by then."""
    reduce, log, failed = Engine.reduce, reporting.log, []

    def fails_once(engine):
        totals = reduce(engine)
        if engine.state.progress.step == 1 and "gradients" not in failed:
            failed.append("gradients")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test)")
        return totals

    def fails_in_log(run, *arguments):
        if run.state.progress.step == 3 and "log" not in failed:
            failed.append("log")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test)")
        return log(run, *arguments)

    monkeypatch.setattr(Engine, "reduce", fails_once)
    monkeypatch.setattr(reporting, "log", fails_in_log)
    ended = runs.run(tmp_path, *MLP, own("Records"))
    assert failed == ["gradients", "log"]
    assert ended.oom_restarts == 2
    assert steps() == [1, 2, 3, 4]


def test_not_again_after_a_resume_and_in_an_evaluation_of_a_checkpoint(tmp_path):
    runs.run_until(tmp_path, 2, *MLP, own("Records"))
    assert steps() == [1, 2]
    own_hooks.SEEN.clear()
    runs.run(tmp_path, *MLP, own("Records"))
    assert steps() == [3, 4]
    own_hooks.SEEN.clear()
    runs.run(tmp_path, *MLP, own("Records"))  # the run has ended
    assert own_hooks.SEEN == []
    runs.run(tmp_path / "b", *MLP, own("Records"), "mode=eval", f"checkpointing.resume={tmp_path}")
    assert [call[:2] for call in own_hooks.SEEN] == [("evaluation", 4)]


# What they cannot do


def test_numbers_drawn_modes_and_gradients_do_not_reach_the_run(tmp_path):
    plain = runs.run_until(tmp_path / "plain", 4, *MLP)
    disturbed = runs.run_until(tmp_path / "disturbed", 4, *MLP, own("Disturbs"))
    assert torch.equal(runs.weights(plain.state.model), runs.weights(disturbed.state.model))
    assert disturbed.state.model.training


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((own("Nothing"),), r"callbacks\.mine: a Nothing has none of the methods after_step, after_evaluation, on_end"),
        (
            (own("Records", name="early_stopping"), "stopping.patience=2", "every.eval=2"),
            r"callbacks\.early_stopping: stopping\.patience adds a callback of this name",
        ),
    ],
)
def test_what_is_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path, *MLP, *overrides)


# Errors


def test_an_error_ends_the_run_after_saving_it(tmp_path):
    with pytest.raises(TrainingStopped) as stopped:
        runs.run(tmp_path, *MLP, own("Fails", step=2), own("Records", name="records"), "every.eval=2")
    assert own_hooks.SEEN == [("step", 1, 16, False)]  # none is called any more
    text = str(stopped.value)
    assert text.startswith("callbacks.mine: after_step failed at step 2\nTraceback (most recent call last):\n")
    assert 'raise ValueError("no such plot")\nValueError: no such plot\n' in text
    assert f"the run is saved in {runs.checkpoint(tmp_path, 2)}" in text
    assert runs.saved(tmp_path, 2)["progress"]["step"] == 2
    ended = runs.run(tmp_path, *MLP, own("Fails", step=2))  # not called again for step 2
    assert ended.steps == 4


def test_running_out_of_memory_in_a_callback_is_its_error(tmp_path):
    with pytest.raises(
        TrainingStopped, match=r"callbacks\.mine: after_evaluation failed at step 2[\s\S]*out of memory"
    ):
        runs.run(tmp_path, *MLP, own("RunsOut"), "every.eval=2")
    assert not (tmp_path / "oom").exists()


# Stopping


def test_a_callback_ends_the_run(tmp_path):
    ended = runs.run(tmp_path, *MLP, own("StopsAt", step=3))
    assert ended.steps == 3
    assert result(tmp_path)["ended"] == "callbacks.mine: step 3"
    assert runs.saved(tmp_path, 3)["progress"]["stopped"] == "callbacks.mine: step 3"


# No evaluation improves by 10.
STOPPING = ("every.eval=1", "every.save=1", "train.max_steps=9", "stopping.patience=3", "stopping.min_delta=10")


@pytest.mark.slow
def test_early_stopping(tmp_path, caplog):
    run = runs.run_until(tmp_path, 3, *MLP, *STOPPING)
    assert run.state.progress.stopped is None
    assert runs.saved(tmp_path, 3)["stateful"][0]["callbacks.early_stopping"]["bad"] == 2
    ended = runs.run(tmp_path, *MLP, *STOPPING)
    assert ended.steps == 4  # the first is the best, and three more
    assert ended.ended.startswith("stopping.patience=3: accuracy has not improved on ")
    assert ended.ended.endswith(", of step 1, since")
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]
    # It has ended, also for a process that comes later; with more patience it continues where it was.
    assert runs.run(tmp_path, *MLP, *STOPPING).steps == 4
    runs.run(tmp_path, *MLP, "mode=eval", f"checkpointing.resume={tmp_path}")
    assert "only the checkpoint" not in caplog.text
    assert runs.run(tmp_path, *MLP, *STOPPING[:3], "stopping.patience=5", "stopping.min_delta=10").steps == 6


def test_an_improvement_resets_the_patience(tmp_path):
    run = runs.prepare(tmp_path, *MLP, "every.eval=1", "stopping.patience=2", "stopping.metric=min loss")
    run.close()
    early = run.callbacks.by_name["early_stopping"]
    stops = []
    for step, loss in enumerate([3.0, 4.0, 2.0, float("nan"), 1.5, 1.5, 1.6], start=1):
        view = callback_calls._view(run, "early_stopping", callback_calls.Verdict())
        changed = {"step": step, "stop": stops.append, "is_scheduled": True}
        early.after_evaluation(type(view)(**{**vars(view), **changed}), {"loss": loss})
        assert bool(stops) == (step == 7)
    assert (early.best, early.best_step) == (1.5, 5)


def test_another_metric_begins_without_a_best_value(tmp_path):
    """An accuracy is not compared with a loss."""
    early = EarlyStopping(2, 0.0, "min", "loss")
    early.after_evaluation(SimpleNamespace(step=1, is_scheduled=True), {"loss": 0.5})
    for direction, metric, best in (("min", "loss", 0.5), ("max", "loss", None), ("min", "error", None)):
        other = EarlyStopping(2, 0.0, direction, metric)
        other.load_state_dict(early.state_dict())
        assert other.best == best


def test_a_failing_close_leaves_the_others_to_be_closed(caplog):
    closed = []
    bad = SimpleNamespace(on_end=print, close=lambda: closed.append(1 / 0))
    Callbacks({"bad": bad, "good": SimpleNamespace(on_end=print, close=lambda: closed.append("good"))}).close()
    assert closed == ["good"]
    assert "callbacks.bad: close failed" in caplog.text


def test_a_metric_that_is_misspelt_or_no_number_is_named(tmp_path):
    message = r"stopping\.metric=max acuracy: there is no such metric; there are accuracy, loss"
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path, *MLP, *STOPPING, "stopping.metric=max acuracy")
    assert not (tmp_path / "metrics.jsonl").exists()  # before anything is trained
    with pytest.raises(UserError, match=r"stopping\.metric=max matrix: there is no such metric; there are loss"):
        EarlyStopping(2, 0.0, "max", "matrix").after_evaluation(None, {"matrix": torch.eye(2), "loss": 1.0})


# Shipped ones


def test_predictions_and_confusion_matrix(tmp_path):
    """What they compute: test_predict.py, test_classes_of_pixels."""
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    runs.run(tmp_path, *MLP, "callbacks=[predictions,confusion_matrix]", "every.eval=4")
    rows = json_lines(tmp_path / "predictions/step_00000004.jsonl")
    assert [sorted(row) for row in rows] == [["prediction", "probability", "sample", "target"]] * 8
    table = (tmp_path / "confusion_matrix/step_00000004.csv").read_text().splitlines()
    assert table[0] == "true class / predicted,0,1,2,3,4,5,6,7,8,9"
    assert sum(int(cell) for line in table[1:] for cell in line.split(",")[1:]) == 360
    assert (tmp_path / "confusion_matrix/step_00000004.png").read_bytes().startswith(b"\x89PNG")
    assert "confusion_matrix" in _events(tmp_path).Tags()["images"]
    ((step, text),) = texts(tmp_path)["predictions"]
    assert step == 4
    assert text.startswith("| sample | target | prediction | probability |\n")


TIME_FIRST = ("user_packages=[own_inference]", "callbacks=predictions")


@pytest.mark.parametrize(("steps", "samples"), [(8, 2), (2, 1)])
def test_predictions_of_something_else_than_samples_are_refused(tmp_path, steps, samples):
    """Time comes first. Two steps are as many as the samples of the trial before training, and of each evaluation
    batch; half a batch tells them apart.
    """
    task = f"task={{_target_: own_inference.ShownTimeFirst, steps: {steps}}}"
    sizes = ("every.eval=4", "batch.eval_micro_size=2")
    with pytest.raises(UserError, match=rf"outputs for {samples} samples? have shape \[{steps}, {samples}, 10\]"):
        runs.run(tmp_path, *runs.MODELS["mlp"], *TIME_FIRST, *sizes, task)
    assert not (tmp_path / "predictions").exists()


def test_half_a_batch_is_tried_once_and_changes_nothing(tmp_path, monkeypatch):
    tried = []
    try_half = evaluate.try_half
    monkeypatch.setattr(evaluate, "try_half", lambda *arguments: (tried.append(1), try_half(*arguments)))
    own = (*runs.MODELS["mlp"], "user_packages=[own_inference]", "task=own_inference.shown", "every.eval=2")
    runs.run(tmp_path / "shown", *own, "callbacks=predictions")
    runs.run(tmp_path / "plain", *own)
    assert tried == [1]
    assert [row["loss"] for row in evaluations(tmp_path / "shown")] == [
        row["loss"] for row in evaluations(tmp_path / "plain")
    ]
