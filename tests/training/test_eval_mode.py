"""Evaluation: reproduces the number that training logged, and has no effect on training."""

import signal
from pathlib import Path
from typing import Any

import helpers
import pytest
import runs
import torch
from torch import nn

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.run import runner
from trainapp.state.snapshot import Snapshot
from trainapp.training import loop
from trainapp.trials import probe


@pytest.mark.slow
def test_agrees_with_what_training_logged(tmp_path):
    """Bit-identical at the same batch size, up to rounding at another. The average is evaluated where training did."""
    overrides = (*runs.MODELS["resnet"], "optimizer.lr=0.05", "train.max_steps=6", "every.eval=3", "every.save=3")
    runs.run(tmp_path / "run", *overrides, "train.ema=0.5")
    logged = {line["step"]: line for line in helpers.evaluations(tmp_path / "run")}
    for step, resume in ((6, tmp_path / "run"), (3, runs.checkpoint(tmp_path / "run", 3))):
        out = tmp_path / f"eval{step}"
        runs.run(out, *overrides, "mode=eval", f"checkpointing.resume={resume}")
        (line,) = helpers.evaluations(out)
        assert line == logged[step]
    out, another = tmp_path / "another_batch", ("mode=eval", "batch.eval_micro_size=7")
    again = runs.run(out, *overrides, *another, f"checkpointing.resume={tmp_path / 'run'}")
    (line,) = helpers.evaluations(out)
    assert line["loss"] == pytest.approx(logged[6]["loss"], rel=1e-5)
    assert again.objective == pytest.approx(logged[6]["accuracy"], rel=1e-2)
    assert logged[3]["loss"] != logged[6]["loss"]


def test_the_global_batch_is_that_of_the_run(tmp_path):
    """A contrastive loss depends on it. A loaded model does not: its data may be too few for the default one."""
    pairs = ("model=mlp", "model.width=16", "data._target_=trainapp.data.sets.digits.DigitPairs", "data.drop_last=true")
    quiet = ("train.device=cpu", "memory.guard=false", "tracker=[]", "train.max_epochs=null")
    trained = (*quiet, *pairs, "batch.global_size=128", "train.max_steps=2", "every.eval=2", "every.save=2")
    runner.run(compose.from_command_line(list(trained), str(tmp_path / "run")))
    evaluated = (*quiet, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    runner.run(compose.from_command_line(list(evaluated), str(tmp_path / "eval")))
    (logged,) = helpers.evaluations(tmp_path / "run")
    (again,) = helpers.evaluations(tmp_path / "eval")
    assert again["loss"] == logged["loss"]
    with pytest.raises(UserError, match="global_size"):  # named on the command line, it is taken
        runner.run(compose.from_command_line([*evaluated, "batch.global_size=2000"], str(tmp_path / "other")))


def test_an_optimizer_on_its_command_line_is_that_of_the_run(tmp_path):
    """An evaluation makes no step. On the old code: "saved with AdamW, but this run has RMSprop"."""
    mlp = (*runs.MODELS["mlp"], "tracker=[]")
    runs.run(tmp_path / "run", *mlp, "every.eval=4")
    other = ("optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.5")
    runs.run(tmp_path / "eval", *mlp, *other, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    (logged,) = helpers.evaluations(tmp_path / "run")
    (again,) = helpers.evaluations(tmp_path / "eval")
    assert again["loss"] == logged["loss"]


def test_agrees_with_plain_pytorch(tmp_path):
    """The mean over all samples of the validation split, in eval mode, including an uneven last batch."""
    runs.run(tmp_path, *runs.MODELS["resnet"], "train.max_steps=6", "every.eval=6", "batch.eval_micro_size=100")
    run = runs.prepare(tmp_path, *runs.MODELS["resnet"], "train.max_steps=6")
    run.tracker.close()
    batch = run.eval_sets[""].dataset.__getitems__(list(range(360)))
    model = run.state.model.eval()
    with torch.no_grad():
        logits = model(batch["inputs"])
    (line,) = helpers.evaluations(tmp_path)
    assert line["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, batch["targets"])), rel=1e-5)
    assert line["accuracy"] == int((logits.argmax(-1) == batch["targets"]).sum()) / 360
    with torch.no_grad():
        trained = nn.functional.cross_entropy(model.train()(batch["inputs"]), batch["targets"])
    assert abs(float(trained) - line["loss"]) > 1e-3  # train mode uses the batch's own statistics


class OwnNoise:
    """A loss that draws from a generator of its own, in evaluation too."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, model, batch):
        losses = nn.functional.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
        return losses.sum() * torch.rand((), generator=self.generator), len(losses), {}


OWN_NOISE = ("task=test_eval_mode.OwnNoise", "user_packages=[test_eval_mode]", "objective=min loss")


@pytest.mark.parametrize(
    ("case", "extra"), [pytest.param("resnet", (), marks=pytest.mark.slow), ("gpt", ()), ("mlp", OWN_NOISE)]
)
def test_how_often_it_is_done_changes_nothing_in_training(tmp_path, case, extra):
    """Neither BatchNorm's statistics nor the draws of dropout and of the task."""
    ends = []
    for every in ("null", "2"):
        runs.run(tmp_path / every, *runs.MODELS[case], *extra, f"every.eval={every}", "batch.eval_micro_size=360")
        state = runs.saved(tmp_path / every, 4)
        ends.append([state[part] for part in ("model", "optimizer", "sampler")])
    assert runs.differences(*ends) == []
    assert not (tmp_path / "null" / "evaluations.jsonl").exists()
    assert len(helpers.evaluations(tmp_path / "2")) == 2


def test_the_runs_own_files_stay(tmp_path):
    """Evaluating an older checkpoint in the run's own directory removes none of its lines."""
    runs.run(
        tmp_path, *runs.MODELS["mlp"], "every.save=2", "train.max_steps=8", "every.eval=2", "checkpointing.keep_last=9"
    )
    before = (tmp_path / "metrics.jsonl").read_text()
    result = (tmp_path / "result.json").read_text()
    evaluations = helpers.evaluations(tmp_path)
    runs.run(tmp_path, *runs.MODELS["mlp"], "mode=eval", f"checkpointing.resume={runs.checkpoint(tmp_path, 4)}")
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert (tmp_path / "result.json").read_text() == result
    assert helpers.evaluations(tmp_path)[:4] == evaluations


def test_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="it needs a trained model; name the checkpoint"):
        runs.run(tmp_path, *runs.MODELS["mlp"], "mode=eval")


TABLES = {}  # global: no evaluation restores it


class Caching(nn.Module):
    """Makes a table in evaluation and uses it in the training that follows, as caches of positions do."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images):
        if not TABLES or not self.training:
            TABLES["table"] = torch.linspace(0.5, 1.5, 64)
        return self.head(self.inner(images.flatten(1)) * TABLES["table"])


CACHING = ("~model", "+model._target_=test_eval_mode.Caching", "user_packages=[test_eval_mode]", "data=digits")


def test_a_model_may_keep_what_it_makes_in_evaluation(tmp_path, monkeypatch):
    """Negative control: under inference mode it could not, which is why evaluation is not."""
    losses = {}
    for every in ("2", "null"):
        runs.run(tmp_path / every, *CACHING, f"every.eval={every}")
        losses[every] = [line["loss"] for line in helpers.metrics(tmp_path / every)]
    assert losses["2"] == losses["null"]
    monkeypatch.setattr(loop, "evaluate", torch.inference_mode()(loop.evaluate))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        runs.run(tmp_path / "inference", *CACHING, "every.eval=2")


WRITES = (
    *("data=digits", "task=writing_models.Weighs", "user_packages=[writing_models]", "objective=min loss"),
    *("train.max_steps=6", "schedule=constant", "schedule.warmup=0", "train.check_loss=false", "every.save=1"),
    *("checkpointing.keep_last=9", "batch.eval_micro_size=90", "data.num_workers=0"),
)
AVERAGES = pytest.mark.parametrize("average", [(), ("train.ema=0.5",)], ids=["weights", "average"])


def of_training(run_dir: Path) -> list[Any]:
    """What training has computed: its losses, and the state after the last step."""
    state = runs.saved(run_dir, 6)
    parts = ("model", "optimizer", "average", "stateful", "model_values")
    return [[line["loss"] for line in helpers.metrics(run_dir)], {part: state[part] for part in parts}]


@AVERAGES
def test_what_a_forward_writes_in_evaluation_is_undone(tmp_path, average, monkeypatch):
    own = (*runs.own_model("writing_models.WritesAlways"), *WRITES, *average)
    runs.run(tmp_path / "never", *own, "every.eval=null")
    runs.run(tmp_path / "always", *own, "every.eval=1")
    assert runs.differences(of_training(tmp_path / "never"), of_training(tmp_path / "always")) == []
    runs.run(tmp_path / "rarely", *own, "every.eval=4")
    assert helpers.evaluations(tmp_path / "rarely")[0] == helpers.evaluations(tmp_path / "always")[3]
    monkeypatch.setattr(Snapshot, "return_to", lambda self, state: [])
    runs.run(tmp_path / "kept", *own, "every.eval=1")
    assert runs.differences(of_training(tmp_path / "never"), of_training(tmp_path / "kept")) != []


@pytest.mark.slow
@AVERAGES
def test_it_is_undone_before_the_end_is_saved(tmp_path, average):
    """A run that is extended is the undisturbed one, and the checkpoint evaluates to what was logged."""
    own = (*runs.own_model("writing_models.WritesSaved"), *WRITES, *average, "every.eval=2")
    runs.run(tmp_path / "whole", *own)
    runs.run(tmp_path / "extended", *own, "train.max_steps=3")
    runs.run(tmp_path / "eval", *own, "mode=eval", f"checkpointing.resume={tmp_path / 'extended'}")
    assert helpers.evaluations(tmp_path / "eval") == helpers.evaluations(tmp_path / "extended")[-1:]
    runs.run(tmp_path / "extended", *own)
    assert [line["step"] for line in helpers.evaluations(tmp_path / "extended")] == [2, 3, 4, 6]
    assert runs.differences(of_training(tmp_path / "whole"), of_training(tmp_path / "extended")) == []


def test_it_is_undone_before_a_stopped_run_is_saved(tmp_path):
    """A signal in the second micro-batch of an evaluation."""
    own = (*runs.own_model("writing_models.WritesSaved"), *WRITES, "train.ema=0.5", "every.eval=2")
    runs.run(tmp_path / "whole", *own)
    session = runs.prepare(tmp_path / "parts", *own)
    evaluate, calls = session.engine.evaluate, []

    def interrupted(*arguments):
        calls.append(session.state.progress.step)
        if calls.count(4) == 2:
            session.stop.signal = int(signal.SIGTERM)
        return evaluate(*arguments)

    session.engine.evaluate = interrupted
    loop.train(session)
    session.close()
    assert calls == [2, 2, 2, 2, 4, 4]
    runs.run(tmp_path / "parts", *own)
    assert helpers.evaluations(tmp_path / "parts") == helpers.evaluations(tmp_path / "whole")
    assert runs.differences(of_training(tmp_path / "whole"), of_training(tmp_path / "parts")) == []


@pytest.mark.parametrize(
    ("task", "first"),
    [("task=writing_models.Weighs", "the first trial of the metrics"), ("task=auto", "the evaluation at step 2")],
)
def test_parameters_that_only_evaluations_write_are_named_once(tmp_path, caplog, monkeypatch, task, first):
    """There is no copy of a large model's when they are first written; from then on there is."""
    monkeypatch.setattr(probe, "MAX_COPIED_BYTES", 0)
    own = (*runs.own_model("writing_models.OnlyInEvaluation"), *WRITES, task, "every.eval=2")
    runs.run(tmp_path, *own)
    assert f"{first} is the first to write model.scale in place, of which there was no copy yet" in caplog.text
    assert caplog.text.count("is the first to write") == 1
    scales = {float(runs.saved(tmp_path, step)["model"]["scale"]) for step in (2, 4, 6)}
    assert len(scales) == 1
    assert scales != {1.0}


def test_it_has_no_best_of_its_own(tmp_path):
    """Of a run without evaluations; otherwise the best is the run's."""
    mlp = (*runs.MODELS["mlp"], "train.max_steps=2")
    runs.run(tmp_path / "never", *mlp, "every.eval=null")
    evaluated = runs.run(tmp_path / "a", *mlp, "mode=eval", f"checkpointing.resume={tmp_path / 'never'}")
    assert (evaluated.best_objective, evaluated.best_step) == (None, None)
    trained = runs.run(tmp_path / "often", *mlp, "every.eval=1")
    evaluated = runs.run(tmp_path / "b", *mlp, "mode=eval", f"checkpointing.resume={tmp_path / 'often'}")
    assert (evaluated.best_objective, evaluated.best_step) == (trained.best_objective, trained.best_step)


def test_that_nothing_is_kept_of_what_an_evaluation_writes_goes_without_saying(tmp_path, caplog, monkeypatch):
    """Unless another set is evaluated after it, which finds it."""
    monkeypatch.setattr(probe, "MAX_COPIED_BYTES", 0)
    own = (*runs.own_model("writing_models.OnlyInEvaluation"), *WRITES, "every.eval=null")
    runs.run(tmp_path / "run", *own)
    caplog.clear()
    evaluating = (*own, "mode=eval", f"checkpointing.resume={tmp_path / 'run'}")
    runs.run(tmp_path / "a", *evaluating)
    assert "what it has written stays" not in caplog.text
