"""What trial calls leave as it was: containers, objects and global variables."""

import argparse
import collections
import types
from typing import ClassVar

import numpy as np
import torch

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
    contents = Contents(task)
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
    contents = Contents(loss)
    loss(5)
    contents.restore()
    assert (COUNT, QUEUE, task.buffer.pushed) == (0, [], 0)


def test_what_is_reached_only_as_a_global_variable_is_named():
    def loss(value):
        task(value)

    task = Task()
    contents = Contents(loss)
    contents.restore()
    assert contents.written_globals == set()
    loss(5)
    contents.restore()
    assert contents.written_globals == {
        f"the global variable test_trial_contents.{name}" for name in ("COUNT", "QUEUE")
    }


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
    contents = Contents(task)
    for _ in range(2):
        task()
        assert (task.args.step, Counted.calls, Counted.by_kind) == (1, 1, {"loss": 1})
        contents.restore()
        assert (task.args.step, task.state.step) == (0, 0)
        assert (Counted.calls, Counted.by_kind, hasattr(Counted, "first")) == (0, {}, False)
        assert task.center.values.tolist() == [1, 1]
