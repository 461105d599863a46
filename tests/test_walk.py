"""What is found in users' objects: owners of a state, and tensors beside parameters and buffers."""

import functools
import random
import types
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import writing_models
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trainapp.state import walk
from trainapp.state.stateful import Stateful, held_tensors


class Noise:
    """A transform that can be called, and owns a generator."""

    def __init__(self):
        self.rng = np.random.RandomState(0)

    def __call__(self, sample):
        return sample


def test_what_owns_state_is_found():
    model = nn.Sequential(nn.Linear(1, 1), writing_models.ExtraState(2))
    model[0].noise = [torch.Generator()]
    task = functools.partial(lambda queue, model, batch: None, writing_models.QueueTask())
    own = {"python": random.Random(1), "draw": np.random.default_rng(2).normal}
    data = Subset(SimpleNamespace(transforms=[Noise()], own=own), [0])
    found = Stateful(model=model, task=task, data=data, eval_data=None)
    assert {name: owner.kind for name, owner in found.owners.items()} == {
        "model.1.extra_state": "model",
        "model.0.noise.0": "generator",
        "task.0": "task",
        "task.0.meters.seen": "task",
        "task.0.noise.0": "generator",
        "data.dataset.transforms.0.rng": "generator",
        "data.dataset.own.python": "generator",
        "data.dataset.own.draw": "generator",
    }
    assert len(Stateful(data=[*range(5000), *(random.Random(seed) for seed in range(1500))]).owners) == 1500


def test_modules_of_data_alone_are_not_those_of_forwards():
    """A module that a task has, too, is called with batches."""
    shared, of_data, of_callback = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    data = SimpleNamespace(encoder=shared, transform=of_data)
    roots = {"task": SimpleNamespace(teacher=shared), "callbacks": SimpleNamespace(scorer=of_callback)}
    for stateful in (Stateful(**roots, data=data, eval_data=data), Stateful(data=data, **roots)):
        assert set(stateful.modules.values()) == {shared, of_data, of_callback}
        assert set(stateful.modules_of_forwards()) == {shared, of_callback}


class Meter:
    """Counts, and has its state dict by assignment."""

    def __init__(self):
        self.seen = 0
        self.state_dict = lambda: {"seen": self.seen}
        self.load_state_dict = types.MethodType(lambda self, state: vars(self).update(state), self)


class AnswersAll:
    """An object with an answer to every name."""

    def __getattr__(self, name):
        return lambda *arguments: None


def test_a_state_dict_that_is_assigned_to_the_object_counts():
    meter = Meter()
    owners = Stateful(task=SimpleNamespace(meter=meter, other=AnswersAll(), meter_class=AtCommit)).owners
    assert list(owners) == ["task.meter"]
    meter.seen = 3
    state = owners["task.meter"].copy()
    meter.seen = 4
    owners["task.meter"].restore(state)
    assert meter.seen == 3


def test_nothing_is_found_in_ordinary_parts():
    found = Stateful(model=nn.Linear(1, 1), task=writing_models.cross_entropy, data=[1, 2, 3])
    assert not found.owners
    assert not found.modules


class AtCommit:
    """A stream, say: whatever it holds moves with it."""

    moves_at_commit = True

    def __init__(self):
        self.rng, self.table = random.Random(1), torch.zeros(3)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_what_moves_at_the_commit_is_one_owner():
    source = AtCommit()
    owners = Stateful(data=source).owners
    assert [(name, owner.is_restored_elsewhere) for name, owner in owners.items()] == [("data", True)]
    assert [tensor is source.table for tensor in held_tensors([source])] == [True]


class Model(nn.Module):
    def __init__(self, held=None):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.layer.held = held


@dataclass
class Record:
    tensors: dict = field(default_factory=dict)


def task(tensor):
    def loss(model, batch):
        return tensor.sum()

    return loss


T = torch.zeros(3)
LOOPED: list = [T]
LOOPED.append(LOOPED)
PLACES = {
    "an attribute": T,
    "a list": [1, "two", T],
    "a queue of pairs": deque([("a", T)]),
    "a dict of lists": {"a": [T]},
    "a list that holds itself": LOOPED,
    "a dataclass": Record({"a": T}),
    "a closure": task(T),
    "a bound argument": functools.partial(print, T),
    "another module's attribute": Model([T]),
    "a data set of torch": Subset(TensorDataset(T), [0]),
    "a long dict": {"step": 1} | {f"b{number}": T for number in range(1500)},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_is_found(place):
    assert any(tensor is T for tensor in held_tensors([Model(PLACES[place])]))
    assert any(tensor is T for tensor in held_tensors([PLACES[place]]))


def test_parameters_and_buffers_are_found_once():
    assert len(list(held_tensors([[Model()]]))) == 7


def test_long_lists_of_tensors_are_gone_through_and_tables_are_not():
    assert len(list(held_tensors([[torch.zeros(1) for _ in range(5000)]]))) == 5000
    for table in ([(number, [object()]) for number in range(50_000)], [*range(2500), T, *range(2500)]):
        assert list(held_tensors([Record({"table": table, "a": T})])) == [T]
        assert len(list(held_tensors([Model([table, T])]))) == 7 + 1


def test_it_ends_in_a_large_data_set(monkeypatch):
    monkeypatch.setattr(walk, "MOST_OBJECTS", 10)
    assert 0 < len(list(held_tensors([[[torch.zeros(1)] for _ in range(100)]]))) <= 10


def test_what_has_no_storage_yet_is_passed_over():
    odd = [nn.parameter.UninitializedParameter(), torch.ones(2, 2).to_sparse(), T]
    assert [tensor is T for tensor in held_tensors([odd])] == [False, True]
