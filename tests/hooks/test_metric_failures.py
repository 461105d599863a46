"""A metric that fails: found before training where two samples show it; else reported once its step is saved."""

import contextlib
import gc
import weakref

import pytest
import runs
import torch
from helpers import evaluations

from trainapp.data.digits import Digits
from trainapp.errors import TrainingStopped, UserError
from trainapp.hooks import metric_failures
from trainapp.hooks.metrics import StatefulMetrics
from trainapp.parallel.ranks import SingleRank
from trainapp.train import loop, metric_names, metric_trial
from trainapp.train.restore_point import RestorePoint

MLP = (
    *runs.MODELS["mlp"],
    "user_packages=[own_hooks]",
    "train.max_steps=4",
    "every.eval=2",
    "batch.eval_micro_size=50",
)
R2 = "+metrics.r2={_target_: torchmetrics.R2Score}"


def own(kind, **arguments):
    inner = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"+metrics.mine={{_target_: own_hooks.{kind}{inner}}}"


def without_trial(monkeypatch):
    monkeypatch.setattr(metric_trial, "try_metrics", lambda run: None)


# Before training


def test_a_mistake_in_arguments_shows_before_training(tmp_path, monkeypatch):
    """Negative control: without the trial, at the first evaluation, with the same message."""
    pytest.importorskip("torchmetrics", reason="needs the extra trainapp[metrics]")
    chosen = (*MLP, R2, "task=own_hooks.for_regression")
    with pytest.raises(UserError) as refused:
        runs.run(tmp_path / "tried", *chosen)
    text = str(refused.value)
    assert text.startswith(
        "metrics.r2: the update of a R2Score fails on what the task passes (float32 [2, 10], float32 [2]): RuntimeErr"
    )
    assert text.endswith("metrics['r2'] what this metric takes, or correct it, or leave it out")
    assert "\n" not in text  # every line of the traceback is torchmetrics'
    assert isinstance(refused.value.__cause__, RuntimeError)
    assert not (tmp_path / "tried/checkpoints").exists()
    without_trial(monkeypatch)
    with pytest.raises(
        TrainingStopped, match=r"metrics\.r2: the update of a R2Score .*\(float32 \[50, 10\], .*step_00000002"
    ):
        runs.run(tmp_path / "late", *chosen)
    assert runs.saved(tmp_path / "late", 2)["progress"]["step"] == 2


def test_a_run_that_is_never_evaluated_tries_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(StatefulMetrics, "try_update", lambda *_: pytest.fail("tried"))
    runs.prepare(tmp_path, *MLP, own("Correct"), "every.eval=null").close()


class Counted(Digits):
    """Counts what is read of it."""

    def __init__(self, split: str, augment: bool = False):
        super().__init__(split, augment=augment)
        self.reads = 0

    def __getitems__(self, indices):
        self.reads += len(indices)
        return super().__getitems__(indices)


class Reluctant:
    """A task that needs four samples, and so many only in an evaluation."""

    def __call__(self, model, batch):
        logits = model(batch["inputs"])
        assert model.training or len(logits) >= 4, "too few"
        loss = torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="sum")
        return loss, len(logits), {"*": (logits.detach(), batch["targets"])}


def test_the_trial_leaves_no_trace_in_metrics_and_data(tmp_path, monkeypatch):
    """Negative control: an update that is not undone."""
    chosen = (*MLP, own("Correct"), "user_packages=[own_hooks,test_metric_failures]")
    chosen = (*chosen, "data._target_=test_metric_failures.Counted")
    tried = []
    real = StatefulMetrics.try_update
    monkeypatch.setattr(StatefulMetrics, "try_update", lambda own, passed: tried.append(1) or real(own, passed))
    run = runs.prepare(tmp_path / "a", *chosen)
    run.close()
    assert (tried, run.metrics._held["mine"].metric.updates, run.eval_sets[""].dataset.reads) == ([1], 0, 0)
    monkeypatch.setattr(StatefulMetrics, "try_update", StatefulMetrics.update)
    run = runs.prepare(tmp_path / "b", *chosen)
    run.close()
    assert run.metrics._held["mine"].metric.updates == 1


def test_the_trial_leaves_no_trace_in_a_run(tmp_path, monkeypatch):
    """Bit for bit as without metrics. Negative control: generators that are not restored."""

    def weights(name, *metrics):
        run = runs.prepare(tmp_path / name, *MLP, "model.dropout=0.5", *metrics)
        for _ in range(2):
            loop.train_step(run)
        run.close()
        return runs.weights(run.state.model)

    expected = weights("a")
    assert torch.equal(weights("b", own("Draws")), expected)
    monkeypatch.setattr(metric_names, "preserved_rng", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(RestorePoint, "restore", lambda self: None)
    assert not torch.equal(weights("c", own("Draws")), expected)


def test_a_task_that_fails_on_two_samples_is_left_to_the_evaluation(tmp_path):
    chosen = (*MLP, own("Correct"), "user_packages=[own_hooks,test_metric_failures]", "train.check_loss=false")
    ended = runs.run(tmp_path, *chosen, "task=test_metric_failures.Reluctant")
    assert ended.steps == 4
    assert [line["mine/total"] for line in evaluations(tmp_path)] == [360, 360]


# In an evaluation


@pytest.mark.parametrize("where", ["update", "compute"])
def test_an_error_ends_the_run_after_saving_it(tmp_path, where):
    """And the next one begins with that evaluation, as if there had been no error."""
    runs.run(tmp_path / "whole", *MLP, own("Correct"))
    with pytest.raises(TrainingStopped) as stopped:
        runs.run(tmp_path / "run", *MLP, own("FailsLate", where=where))
    first, *others = str(stopped.value).splitlines()
    what = "the update of a FailsLate fails on what the task passes (float32 [50, 10], int64 [50])"
    what = what if where == "update" else "compute of a FailsLate fails"
    assert first.startswith(f"metrics.mine: {what}: KeyError: 'no such threshold'; ")
    assert others[0] == "Traceback (most recent call last):"  # the fault is in the user's own code
    assert any("own_hooks.py" in line for line in others)
    assert not any("hooks/metrics.py" in line for line in others[:3])
    assert others[-1].startswith(f"the run is saved in {runs.checkpoint(tmp_path / 'run', 2)}")
    assert isinstance(stopped.value.__cause__, KeyError)
    assert not (tmp_path / "run/evaluations.jsonl").exists() or not evaluations(tmp_path / "run")
    assert runs.run(tmp_path / "run", *MLP, own("Correct")).steps == 4
    kept = [{k: v for k, v in line.items() if k != "time"} for line in evaluations(tmp_path / "run")]
    assert [line["step"] for line in kept] == [2, 4]
    assert [line["loss"] for line in kept] == [line["loss"] for line in evaluations(tmp_path / "whole")]


def test_in_mode_eval(tmp_path):
    runs.run(tmp_path / "run", *MLP)
    resume = ("mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    with pytest.raises(TrainingStopped, match=r"metrics\.mine: compute of a FailsLate fails"):
        runs.run(tmp_path / "eval", *MLP, own("FailsLate", where="compute"), *resume)


def test_what_is_kept_of_an_error_holds_no_batch(monkeypatch):
    """Its traceback stays. Negative control: frames that are not cleared."""

    class Fails:
        def update(self, values):
            scaled = values * 2
            seen.append(weakref.ref(scaled))
            raise RuntimeError("a test")

        def compute(self): ...

        def reset(self): ...

    seen = []
    held = StatefulMetrics({"m": Fails()})
    held.update({"*": (torch.ones(3),)})
    gc.collect()
    assert held.results(SingleRank()) == {}
    assert held.failure.__cause__.__traceback__.tb_frame.f_code.co_name == "update"
    assert seen.pop()() is None
    monkeypatch.setattr(metric_failures, "_free", lambda error: None)
    held = StatefulMetrics({"m": Fails()})
    held.update({"*": (torch.ones(3),)})
    assert seen.pop()() is not None


def test_a_lost_device_is_not_the_metrics_error(tmp_path):
    run = runs.prepare(tmp_path, *MLP, own("Correct"))
    run.close()
    assert run.metrics.passes_on(RuntimeError("CUDA error: device-side assert triggered"))
    assert run.metrics.passes_on(RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test)"))
    assert not run.metrics.passes_on(RuntimeError("shapes differ"))
