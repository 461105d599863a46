"""`task` as a mapping: a function or class with arguments; and what a task says of itself in attributes."""

import functools

import own_tasks
import pytest
import runs
from helpers import metrics
from torch.nn import functional as F

from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.losses.losses import attribute
from trainapp.run import directory, resume


def scaled(model, batch, scale, shift=0.0):
    """A loss with a setting of its own."""
    loss = F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")
    return loss * scale + shift * len(batch["targets"]), len(batch["targets"]), {}


class Scaled:
    """The same as a class."""

    def __init__(self, scale: float, shift: float = 0.0):
        self.scale, self.shift = scale, shift

    def __call__(self, model, batch):
        """The loss of a batch."""
        return scaled(model, batch, self.scale, self.shift)


class Silent:
    """No task: it cannot be called."""


halved = functools.partial(scaled, scale=0.5)


OWN = ("model=mlp", "data=digits", "user_packages=[test_task_arguments]", "train.max_steps=3", "every.log=1")


def losses_of(folder):
    return [line["loss"] for line in metrics(folder) if "loss" in line]


@pytest.mark.parametrize("name", ["scaled", "Scaled"])
def test_a_task_takes_arguments(tmp_path, name):
    runs.run(tmp_path / "one", *OWN, f"task={{_target_: test_task_arguments.{name}, scale: 1}}")
    runs.run(tmp_path / "two", *OWN, f"task={{_target_: test_task_arguments.{name}, scale: 1, shift: 2}}")
    plain, shifted = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert len(plain) == 3
    assert shifted == pytest.approx([loss + 2 for loss in plain])


def test_a_partial_is_a_task(tmp_path):
    runs.run(tmp_path / "one", *OWN, "task={_target_: test_task_arguments.scaled, scale: 0.5}")
    runs.run(tmp_path / "two", *OWN, "task=test_task_arguments.halved")
    assert losses_of(tmp_path / "two") == losses_of(tmp_path / "one")


def test_another_argument_of_the_task_is_another_experiment(tmp_path):
    runs.run(tmp_path, *OWN, "task={_target_: test_task_arguments.scaled, scale: 1}")
    of = "task={_target_: test_task_arguments.scaled, scale: "
    configured = [runs.configure(tmp_path, *OWN, f"{of}{scale}}}") for scale in (1, 2)]
    directory.require_same_experiment(configured[0])
    with pytest.raises(UserError, match=r"task\.scale: 1 before, 2 now"):
        directory.require_same_experiment(configured[1])
    saved = next((tmp_path / "checkpoints").glob("step*"))
    evaluation = runs.configure(tmp_path / "evaluation", "mode=eval", f"checkpointing.resume={tmp_path}", OWN[2])
    assert resume.as_saved(evaluation, saved).task_arguments == {"scale": 1}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("{_target_: classification, smoothing: 0.1}", r"task.smoothing: no such setting"),
        ("{_target_: test_task_arguments.scaled, scal: 1}", r"task.scal: no such setting; did you mean 'scale'"),
        ("{_target_: test_task_arguments.scaled}", r"task.scale: required"),
        ("{_target_: test_task_arguments.Scaled, scale: [1]}", r"task\.scale=\[1\]: .*number"),
        ("test_task_arguments.Silent", "an instance of Silent cannot be called"),
        ("{_target_: auto, scale: 1}", r"task.scale: no such setting"),
    ],
)
def test_arguments_that_a_task_does_not_take(tmp_path, task, message):
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path, *OWN, f"task={task}")


# What a task says of itself: as a function, an object, a `functools.partial` of either, checked or not


def function(model, batch):
    """A loss whose attributes are set on it and on what is made of it."""


own = functools.partial(function)
own.whole_batch = True


@pytest.mark.parametrize("task", [own_tasks.mirrored, functools.partial(own_tasks.mirrored)])
def test_embeddings(task):
    assert losses.compares_samples(task)
    assert losses.has_embeddings(task)
    checked = losses.CheckedTask(task, "task=own")
    assert losses.has_embeddings(checked)
    assert callable(checked.loss_of_embeddings)


def test_attributes_of_a_partial_come_before_those_of_its_function():
    assert losses.compares_samples(own)
    assert losses.needs_whole_batch(losses.CheckedTask(own, "task=own"))
    assert not losses.compares_samples(function)
    assert attribute(functools.partial(own), "whole_batch") is True
    assert attribute(own, "split") is None
