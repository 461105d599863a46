"""A loss that changes with the stage of training: the check of a resumed run sees the stage of its checkpoint."""

import json

import faults
import harness
import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F

from trainapp.errors import UserError
from trainapp.training import limits
from trainapp.trials import later_steps
from trainapp.trials.messages import AddsUp, Refused
from trainapp.trials.probe import MAX_COPIED_BYTES

CLASS_WEIGHTS = torch.arange(1.0, 11.0)
FIRST_OF_SECOND_STAGE = 3  # the steps that were made before it


class Staged(nn.Module):
    """Its buffer holds the number of steps, as a callback writes it."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        return self.layer(inputs.flatten(1))


class Count:
    def after_step(self, view):
        view.model.step.fill_(view.step)


def reweighted(model, batch):
    """Deferred re-weighting: a weighted mean times the number of samples, which is no sum."""
    logits = model(batch["inputs"])
    targets = batch["targets"]
    weights = None
    if model.step >= FIRST_OF_SECOND_STAGE:
        weights = CLASS_WEIGHTS.to(logits.dtype)
    return F.cross_entropy(logits, targets, weight=weights) * len(targets), len(targets), {}


class ByItsState:
    """The same for a stage in the state of the task. `loaded` has the stages that `load_state_dict` was given."""

    def __init__(self):
        self.calls = 0
        self.loaded = []

    def __call__(self, model, batch):
        if model.training:
            self.calls += 1
        logits = model(batch["inputs"])
        return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        self.loaded.append(self.calls)


def staged(task):
    own = (*runs.own_model("test_later_stages.Staged"), "data=digits", f"task=test_later_stages.{task}")
    settings = ("train.max_steps=6", "train.max_epochs=null", "user_packages=[test_later_stages]")
    return (*own, *settings, "+callbacks.count={_target_: test_later_stages.Count}")


def test_a_new_run_from_a_stage_whose_loss_is_no_sum_is_refused(tmp_path):
    runs.run_until(tmp_path / "a", 4, *staged("reweighted"))
    with pytest.raises(UserError, match=r"reweighted: the loss is not a sum over samples"):
        runs.prepare(tmp_path / "b", *staged("reweighted"), f"checkpointing.resume={tmp_path / 'a'}")


def test_a_run_that_continues_in_such_a_stage_is_warned(tmp_path, caplog):
    """It would have gone on undisturbed, too."""
    runs.run_until(tmp_path, 4, *staged("reweighted"))
    caplog.clear()
    result = runs.run(tmp_path, *staged("reweighted"))
    assert result.steps == 6
    texts = {record.getMessage() for record in caplog.records if "not a sum over samples" in record.getMessage()}
    (text,) = texts
    assert text.startswith("task=test_later_stages.reweighted: in the state of the run's checkpoint, the loss is not a")
    assert text in result.depends_on_micro_batch
    checks = json.loads((tmp_path / "recipe.json").read_text())["checks"]
    assert checks["loss in training"] == "is no sum any more, in the state of the run's checkpoint"


def test_an_error_in_such_a_stage_costs_one_step(tmp_path):
    """An out-of-memory error in the commit, from which a new session starts from the checkpoint."""
    own = (*staged("reweighted"), "every.save=4", "every.eval=null")
    recorded = harness.Recorded(runs.configure(tmp_path, *own), faults.Fault("commit", 6))
    assert recorded.result.steps == 6
    assert len(recorded.failures) == 1


def test_a_resume_in_the_stage_before_it_is_not(tmp_path):
    runs.run_until(tmp_path, 2, *staged("reweighted"))
    session = runs.prepare(tmp_path, *staged("reweighted"))
    assert session.checks["loss in training"].startswith("adds up over 4 samples")
    session.close()


def test_the_check_changes_nothing_of_a_resumed_run(tmp_path):
    whole, parts = runs.resumed(tmp_path, 3, *staged("ByItsState"))
    assert runs.differences(whole, parts) == []


# --- during a run


def run_of(tmp_path, task, *overrides):
    own = (*staged(task), "train.max_steps=18", "every.eval=null", "checkpointing.save=false", *overrides)
    return runs.run(tmp_path, *own)


def warnings_of(caplog):
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in texts if ": from step " in text]


@pytest.fixture
def compared(monkeypatch):
    """The findings of the comparisons in later steps: the mode, and what was found of the loss."""
    findings = []
    compare = later_steps._findings

    def noting(session, samples, mode):
        of_mode = compare(session, samples, mode)
        findings.append((mode.work, of_mode.loss))
        return of_mode

    monkeypatch.setattr(later_steps, "_findings", noting)
    return findings


@pytest.mark.parametrize("size", [16, 5])
def test_a_loss_that_is_no_sum_from_some_step_on_is_named(tmp_path, caplog, size):
    result = run_of(tmp_path, "reweighted", f"batch.micro_size={size}")
    (text,) = warnings_of(caplog)
    assert text.startswith("task=test_later_stages.reweighted: from step 16 at the latest, the loss is not a sum over")
    assert "for 4 samples it returns " in text
    assert text in result.depends_on_micro_batch


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_small_difference_is_named(tmp_path, caplog, seed, size, precision):
    """Of a micro-batch, whose classes are nearly even, the weighted mean differs by less than the rounding of bf16."""
    sizes = (f"batch.micro_size={size}", "batch.global_size=64")
    run_of(tmp_path, "reweighted_from_10", f"train.seed={seed}", f"precision={precision}", *sizes)
    assert len(warnings_of(caplog)) == 1


def reweighted_from_10(model, batch):
    weights = CLASS_WEIGHTS if model.step >= 10 else torch.ones(10)
    logits = model(batch["inputs"])
    targets = batch["targets"]
    return F.cross_entropy(logits, targets, weight=weights.to(logits.dtype)) * len(targets), len(targets), {}


class Normalised(Staged):
    """With BatchNorm, as most convolutional networks."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, inputs):
        return self.layer(self.norm(inputs.flatten(1)))


def focal_mean(model, batch):
    """The focal loss of the batch's mean, times its samples; from some step on."""
    logits = model(batch["inputs"])
    number = len(logits)
    loss = F.cross_entropy(logits, batch["targets"])
    if model.step >= FIRST_OF_SECOND_STAGE:
        loss = (1 - torch.exp(-loss)) ** 2 * loss
    return loss * number, number, {}


def only_evaluated(model, batch):
    """The same in evaluation mode alone."""
    if model.training:
        return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum"), len(batch["targets"]), {}
    return focal_mean(model, batch)


@pytest.mark.parametrize("task", ["focal_mean", "only_evaluated"])
def test_a_model_with_batchnorm_is_compared(tmp_path, caplog, compared, task):
    """In evaluation mode, where nothing excuses a difference; also of a step that is never cut."""
    run_of(tmp_path, task, "model._target_=test_later_stages.Normalised")
    (text,) = warnings_of(caplog)
    assert "the loss is not a sum over samples" in text
    refused_in = [work.strip() for work, finding in compared if isinstance(finding, Refused)]
    assert refused_in == ["train" if task == "focal_mean" else "evaluation"]


class Learnt(Normalised):
    """Its outputs are those of samples that are learnt: the loss of each is about 1e-4."""

    def __init__(self, num_classes: int, is_large: bool):
        super().__init__(num_classes)
        if is_large:  # of more than 64 MiB, which is not copied to fp64
            self.register_buffer("large", torch.zeros(MAX_COPIED_BYTES // 4 + 1))

    def forward(self, batch):
        logits = super().forward(batch["inputs"])
        return logits + 12 * F.one_hot(batch["targets"], logits.shape[1])


class OfLearnt:
    """The cube of the batch's mean loss, from some step on."""

    def __call__(self, model, batch):
        loss = F.cross_entropy(model(batch), batch["targets"])
        if model.step >= FIRST_OF_SECOND_STAGE:
            loss = loss**3
        return loss * len(batch["targets"]), len(batch["targets"]), {}


@pytest.mark.parametrize("is_large", [False, True])
def test_a_loss_near_zero_is_compared_to_its_own_size(tmp_path, caplog, is_large):
    own = ("model._target_=test_later_stages.Learnt", f"+model.is_large={is_large}", "optimizer.lr=1e-5")
    run_of(tmp_path, "OfLearnt", *own)
    (text,) = warnings_of(caplog)
    assert "the loss is not a sum over samples" in text


def cubed(model, batch, scale: float):
    """The cube of the batch's mean loss, times a small number."""
    loss = F.cross_entropy(model(batch["inputs"]), batch["targets"])
    return scale * loss**3 * len(batch["targets"]), len(batch["targets"]), {}


def cancelling(model, batch):
    """Summands of about 1 in a sum of nearly zero."""
    logits = model(batch["inputs"]) / 3
    values = torch.cat([logits, -logits - 1e-9], 1).float()
    return values.sum(), len(values), {}


@pytest.mark.parametrize("scale", [1e-6, 1e-9, 1e-12])
def test_a_small_loss_that_is_no_sum_is_refused(tmp_path, scale):
    own = (*staged("cubed"), "task={_target_: test_later_stages.cubed, scale: " + str(scale) + "}")
    with pytest.raises(UserError, match=r"the loss is (not a sum|a mean)"):
        runs.prepare(tmp_path, *own)


def test_a_small_loss_of_large_summands_is_not_refused(tmp_path):
    session = runs.closed(tmp_path, *staged("cancelling"))
    assert session.checks["loss in training"].startswith("adds up over 4 samples")


def test_the_comparison_changes_nothing_of_a_model_with_batchnorm(tmp_path, monkeypatch):
    ends = []
    for first_step in (16, 10**9):
        monkeypatch.setattr(limits, "FIRST_LATER_CHECK", first_step)
        own = (*staged("summed"), "model._target_=test_later_stages.Normalised", "train.max_steps=18")
        runs.run(tmp_path / str(first_step), *own, "every.eval=null")
        ends.append(runs.end(tmp_path / str(first_step), 18))
    assert runs.differences(*ends) == []


def summed(model, batch):
    """Deferred re-weighting as a sum: its count is the sum of the weights."""
    logits = model(batch["inputs"])
    targets = batch["targets"]
    weights = torch.ones_like(CLASS_WEIGHTS)
    if model.step >= FIRST_OF_SECOND_STAGE:
        weights = CLASS_WEIGHTS
    loss = F.cross_entropy(logits, targets, weight=weights.to(logits.dtype), reduction="sum")
    return loss, weights[targets].sum(), {}


def noisy(model, batch):
    """Draws of samples from some step on: the comparison says nothing of a draw that was not learnt."""
    inputs = batch["inputs"]
    if model.step >= FIRST_OF_SECOND_STAGE:
        inputs = inputs + torch.randn(3, len(inputs), *inputs.shape[1:]).mean(0)
    return F.cross_entropy(model(inputs), batch["targets"], reduction="sum"), len(inputs), {}


def dropped(model, batch):
    """Draws of samples from the first step on."""
    logits = F.dropout(model(batch["inputs"]), 0.5, model.training)
    return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}


class Whole:
    whole_batch = True

    def __call__(self, model, batch):
        return reweighted(model, batch)


@pytest.mark.parametrize("draws", ["per_sample", "device"])
@pytest.mark.parametrize("task", ["summed", "noisy", "dropped", "Whole", "ByItsState"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_losses_are_not(tmp_path, caplog, compared, task, draws, precision):
    run_of(tmp_path, task, f"train.draws={draws}", f"precision={precision}")
    assert warnings_of(caplog) == []
    works = [work.strip() for work, _ in compared]
    assert works == ([] if task == "Whole" else ["train", "evaluation"])


def test_the_comparison_leaves_no_trace(tmp_path, monkeypatch, compared):
    """Neither in the weights, nor in the draws, nor in a task's state."""
    ends = []
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(limits, "FIRST_LATER_CHECK", 10**9)
        for task in ("dropped", "ByItsState"):
            runs.run(tmp_path / name / task, *staged(task), "train.max_steps=18", "every.eval=null")
            ends.append(runs.end(tmp_path / name / task, 18))
    assert runs.differences(ends[:2], ends[2:]) == []
    assert len(compared) == 4  # two modes of each task, all in the first two runs
    assert all(isinstance(finding, AddsUp) for _, finding in compared)


def test_the_steps_of_the_comparison():
    assert [step for step in range(1, 5000) if limits.later_check_is_due(step)] == [16, 64, 256, 1024, 4096]


class Augmented(torch.utils.data.Dataset):
    """Other samples in each fetch, as of a generator in an attribute; counts the fetches."""

    fetches = 0

    def __init__(self, split):
        self.generator = torch.Generator().manual_seed(len(split))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        type(self).fetches += 1
        return {"inputs": torch.randn(1, 8, 8, generator=self.generator), "targets": index % 10}


def test_no_sample_is_fetched_again(tmp_path, caplog, monkeypatch):
    own = ("data._target_=test_later_stages.Augmented", "~data.augment", "+model.num_classes=10")
    fetches = []
    for first_step in (16, 10**9):
        monkeypatch.setattr(limits, "FIRST_LATER_CHECK", first_step)
        Augmented.fetches = 0
        run_of(tmp_path / str(first_step), "summed", *own)
        fetches.append(Augmented.fetches)
    assert fetches[0] == fetches[1] > 16 * 16
    assert warnings_of(caplog) == []
