"""Evaluation: reproduces the number that training logged, and has no effect on training."""

import helpers
import pytest
import runs
import torch
from torch import nn

from trainapp.errors import UserError
from trainapp.training import loop


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


@pytest.mark.parametrize(("case", "extra"), [("resnet", ()), ("gpt", ()), ("mlp", OWN_NOISE)])
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


class Caching(nn.Module):
    """Makes a table in evaluation and uses it in the training that follows, as caches of positions do."""

    def __init__(self):
        super().__init__()
        self.inner, self.head, self.table = nn.Linear(64, 64), nn.Linear(64, 10), None

    def forward(self, images):
        if self.table is None or not self.training:
            self.table = torch.linspace(0.5, 1.5, 64)
        return self.head(self.inner(images.flatten(1)) * self.table)


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
