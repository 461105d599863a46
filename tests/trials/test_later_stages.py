"""A loss that changes with the stage of training: the check of a resumed run sees the stage of its checkpoint."""

import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F

from trainapp.errors import UserError

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


def test_a_resume_in_a_stage_whose_loss_is_no_sum_is_refused(tmp_path):
    runs.run_until(tmp_path, 4, *staged("reweighted"))
    with pytest.raises(UserError, match=r"reweighted: the loss is not a sum over samples"):
        runs.prepare(tmp_path, *staged("reweighted"))


def test_a_resume_in_the_stage_before_it_is_not(tmp_path):
    runs.run_until(tmp_path, 2, *staged("reweighted"))
    session = runs.prepare(tmp_path, *staged("reweighted"))
    assert session.checks["loss in training"].startswith("adds up over 4 samples")
    session.close()


def test_the_check_changes_nothing_of_a_resumed_run(tmp_path):
    whole, parts = runs.resumed(tmp_path, 3, *staged("ByItsState"))
    assert runs.differences(whole, parts) == []
