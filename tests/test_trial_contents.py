"""What trial calls leave as it was: containers, objects and global variables."""

import argparse
import collections
import itertools
import sys
import types
from typing import ClassVar

import numpy as np
import own_counters
import torch
from torch.utils.data import DataLoader

from trainapp.state.contents import Contents

COUNT = 0
QUEUE: list[int] = []


class Buffer:
    """A replay buffer, as GANs have it: no module, no state dict."""

    def __init__(self):
        self.data = [torch.zeros(2)]
        self.pushed = 0

    def push(self, value):
        self.data[0].add_(1)
        self.data.append(value)
        self.pushed += 1


class Task:
    """Changes something in every place."""

    def __init__(self):
        self.buffer = Buffer()
        self.recent = collections.deque([1, 2], maxlen=2)
        self.by_name = {"a": {1}}
        self.means = np.zeros(3)

    def __call__(self, value):
        global COUNT
        COUNT += 1
        QUEUE.append(value)
        self.buffer.push(value)
        self.recent.append(value)
        self.by_name["a"].add(value)
        self.by_name["b"] = value
        self.means += value


def test_everything_is_put_back_in_place():
    task = Task()
    buffer = task.buffer
    first = buffer.data[0]
    contents = Contents(task=task)
    for _ in range(2):  # restored any number of times
        task(3)
        assert (COUNT, QUEUE, buffer.pushed) == (1, [3], 1)
        contents.restore()
        assert (COUNT, QUEUE) == (0, [])
        assert task.buffer is buffer
        assert buffer.data[0] is first
        assert (len(buffer.data), first.tolist(), buffer.pushed) == (1, [0, 0], 0)
        assert list(task.recent) == [1, 2]
        assert task.by_name == {"a": {1}}
        assert task.means.tolist() == [0, 0, 0]


def test_functions_that_a_function_calls_are_followed():
    def loss(value):
        task(value)

    task = Task()
    contents = Contents(task=loss)
    loss(5)
    contents.restore()
    assert (COUNT, QUEUE, task.buffer.pushed) == (0, [], 0)


def test_what_is_reached_only_as_a_global_variable_is_named():
    def loss(value):
        task(value)

    task = Task()
    contents = Contents(task=loss)
    contents.restore()
    assert contents.written_globals == set()
    loss(5)
    contents.restore()
    assert contents.written_globals == {
        f"the global variable test_trial_contents.{name}" for name in ("COUNT", "QUEUE")
    }


class Iterating:
    """A task with iterators of every kind."""

    def __init__(self):
        loader = DataLoader(list(range(9)))
        self.unused = iter([1, 2])
        self.iterators = {
            "generator": (number for number in range(9)),
            "nested": self.endless(loader),
            "loader": iter(loader),
            "list": iter([1, 2, 3]),
            "count": itertools.count(),
            "zip": zip(range(9), itertools.cycle([1, 2]), strict=False),
        }

    @staticmethod
    def endless(loader):
        while True:
            yield from loader

    def __call__(self):
        for iterator in self.iterators.values():
            next(iterator)


def test_iterators_stay_where_they_are_and_are_named():
    task = Iterating()
    contents = Contents(task=task)
    contents.restore()
    assert contents.advanced_iterators == set()
    task()
    contents.restore()
    names = {f"task.iterators.{name}" for name in task.iterators}
    if sys.version_info >= (3, 14):  # itertools hide their position
        names.discard("task.iterators.zip")
    assert contents.advanced_iterators == names
    assert contents.written_globals == set()
    assert [next(iterator) for iterator in task.iterators.values()][3:5] == [2, 1]


def test_variables_of_other_modules_are_put_back_and_named():
    def loss():
        own_counters.CALLS += 1

    contents = Contents(task=loss)
    before = own_counters.CALLS
    loss()
    contents.restore()
    assert before == own_counters.CALLS
    assert contents.written_globals == {"the global variable own_counters.CALLS"}


class Counted:
    """A task that counts its calls where scripts do: in a namespace, in its class, through `.data`."""

    calls = 0
    by_kind: ClassVar[dict[str, int]] = {}

    def __init__(self):
        self.args = argparse.Namespace(step=0)
        self.state = types.SimpleNamespace(step=0)
        self.center = Center()

    def __call__(self):
        self.args.step += 1
        self.state.step += 1
        Counted.calls += 1
        Counted.first = True
        Counted.by_kind["loss"] = 1
        self.center.values.data.mul_(2)


class Center:
    """A held object with a tensor."""

    def __init__(self):
        self.values = torch.ones(2)


def test_namespaces_classes_and_writes_through_data_are_put_back():
    task = Counted()
    contents = Contents(task=task)
    for _ in range(2):
        task()
        assert (task.args.step, Counted.calls, Counted.by_kind) == (1, 1, {"loss": 1})
        contents.restore()
        assert (task.args.step, task.state.step) == (0, 0)
        assert (Counted.calls, Counted.by_kind, hasattr(Counted, "first")) == (0, {}, False)
        assert task.center.values.tolist() == [1, 1]
