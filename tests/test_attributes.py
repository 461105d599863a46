"""Which attributes of a model and of tasks training has changed."""

import argparse
from collections import deque

import numpy as np
import torch
from torch import nn

from trainapp.state.attributes import Attributes
from trainapp.state.stateful import Stateful


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.lstm = nn.Linear(2, 2), nn.LSTM(2, 2)  # which lists its parameters in an attribute
        self.register_buffer("mean", torch.zeros(2))
        self.steps, self.limit, self.states = 0, float("nan"), [torch.zeros(2)]
        self.groups = {"decayed": [self.linear.weight.data, self.mean]}


class Task:
    """A loss that refers to the model's weights, and holds a module."""

    def __init__(self, model):
        self.weights, self.teacher, self.hidden = [*model.parameters()], [Model()], None
        self.counts, self.recent = np.zeros(2), deque([0], maxlen=2)


class Saved(Task):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_what_differs_from_the_newly_built_objects_is_named():
    """Not other references to parameters and buffers, nor equal values, nor results of a forward."""
    model = Model()
    task = Task(model)
    attributes = Attributes(Stateful(model=model, task=task, callbacks={"c": Task(model)}))
    with torch.no_grad():
        model.linear.weight.add_(1)
        model.mean.add_(1)
    model.states, model.limit, model.late = [torch.zeros(2)], float("nan"), None
    task.hidden = (model.linear(torch.ones(2)), 1)
    task.recent.append(0)
    task.recent.popleft()
    assert attributes.changed() == []

    model.steps += 1
    model.states[0].data.add_(1)
    task.hidden = (task.hidden[0].detach(), 1)
    task.counts[0] += 1
    task.recent.append(1)
    task.teacher[0].steps += 1
    model.cache = {2: [torch.ones(2)]}
    changed = ["cache", "states", "steps", "task.counts", "task.hidden", "task.recent", "task.teacher.0.steps"]
    assert attributes.changed() == changed


def test_a_module_that_a_task_makes_later_is_named():
    """No checkpoint has it; the model, to which a task may refer, is in all of them."""
    model = Model()
    task = Task(model)
    task.built, task.late, task.args = Model(), None, argparse.Namespace(step=0)
    attributes = Attributes(Stateful(model=model, task=task))
    task.model = model
    assert attributes.changed() == []
    task.late = Model()
    task.args.step += 1
    assert attributes.changed() == ["task.args.step", "task.late"]


def test_a_task_with_a_state_dict_answers_for_itself():
    """Except for modules in it, whose state dict does not have their attributes."""
    task = Saved(Model())
    attributes = Attributes(Stateful(**{"generator's task": task}))
    task.recent.append(1)
    task.teacher[0].steps += 1
    assert attributes.changed() == ["generator's task.teacher.0.steps"]


def test_a_task_that_is_a_module_is_searched_like_a_model():
    task = Model()
    attributes = Attributes(Stateful(model=nn.Identity(), task=task))
    task.states = (torch.zeros(2),)
    assert attributes.changed() == ["task.states"]
