"""What a forward may change, and the return to it."""

import copy
import random
from collections import deque
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from trainapp.state.snapshot import Snapshot
from trainapp.state.stateful import Owner, Stateful


class Counting(nn.Module):
    """Plain values and tensors in attributes, extra state, a generator, a buffer of each kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(1000), persistent=False)
        self.register_buffer("lazy", None)
        self.steps, self.running, self.queue = 0, torch.zeros(2), deque()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs):
        self.steps += 1
        self.running.mul_(0.9).add_(inputs.detach().mean(0))
        self.queue.append(self.steps)
        if self.lazy is None:
            self.lazy = torch.zeros(2)
            self.register_buffer("late", torch.ones(2))
            self.cache = self.steps
            self.extra = nn.Linear(2, 2)
        self.lazy = self.lazy + 1
        self.train(not self.training)
        noise = torch.randn(2, generator=self.generator)
        return self.norm(self.linear(inputs)) * self.steps + self.running + noise + self.lazy

    def get_extra_state(self):
        return list(self.queue)

    def set_extra_state(self, state):
        self.queue = deque(state)


def test_a_forward_leaves_no_trace():
    model = Counting()
    names, keys = set(vars(model)), set(model.state_dict())
    snapshot = Snapshot.of(Stateful(model=model))
    snapshot.take()
    first = model(torch.ones(4, 2))
    for _ in range(2):  # any number of times
        snapshot.restore()
        assert (model.steps, model.running.tolist(), list(model.queue), model.training) == (0, [0, 0], [], True)
        assert model.lazy is None
        assert set(vars(model)) == names
        assert set(model.state_dict()) == keys
        assert int(model.norm.num_batches_tracked) == 0
        assert torch.equal(model(torch.ones(4, 2)), first)
    assert not snapshot.lost


def test_changes_are_named_by_their_values():
    """Not what is written or replaced by equal values."""
    model, task, data = Counting(), CountingLoss(), [random.Random(1)]
    model.device, model.equal, model.shape = torch.device("cpu"), torch.ones(2), [1.0, (2, "a")]
    model.again = [model.linear.bias, (model.linear.weight.data, model.table)]
    snapshot = Snapshot.of(Stateful(model=model, task=task, data=data))
    snapshot.take()
    model.table.fill_(1)
    model.linear.weight.data.mul_(1)
    model.device, model.equal, model.shape = torch.device("cpu"), torch.ones(2), [1.0, (2, "a")]
    data[0].random()
    model.result = model.linear(torch.ones(4, 2))
    model.results = task.results = [{"logits": (model.result, 1)}, model.result.detach()]
    assert not snapshot.changed()
    task()
    model.eval()  # the forward turns it back: BatchNorm counts
    model(torch.ones(4, 2))
    model.linear.bias.data.add_(1)
    counted = {f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    own = ("queue", "lazy", "late", "extra", "steps", "running", "cache", "extra_state", "generator", "linear.bias")
    tasks = {f"task.{name}" for name in ("calls", "mean", "by_half")}
    assert set(snapshot.changed()) == counted | {f"model.{name}" for name in own} | tasks


def test_owners_of_kinds_that_moved_on_stay():
    states = {"data": 1, "task": 1}
    owners = {
        kind: Owner(lambda kind=kind: states[kind], lambda value, kind=kind: states.update({kind: value}), kind)
        for kind in states
    }
    snapshot = Snapshot({}, owners)
    snapshot.take()
    states.update(data=2, task=2)
    snapshot.restore(except_kinds=("data",))
    assert states == {"data": 2, "task": 1}


def test_a_second_forward_draws_as_the_first_and_data_is_not_fetched_again():
    model, data = Counting(), [random.Random(1)]
    snapshot = Snapshot.of(Stateful(model=model, data=data))
    snapshot.take()
    first = torch.rand(1, generator=model.generator), data[0].random()
    snapshot.restore_generators()
    second = torch.rand(1, generator=model.generator), data[0].random()
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_constant_buffers_are_copied_once():
    """A causal mask or rotary table costs nothing per step."""
    model = Counting()
    snapshot = Snapshot({"model": model})
    for _ in range(2):
        snapshot.take()
        snapshot.record_step_writes()
    snapshot.take()
    own = snapshot._constants[id(model.table)].copy
    snapshot.take()
    assert snapshot._constants[id(model.table)].copy is own
    model.table.add_(1)
    snapshot.take()
    model.table.add_(1)
    snapshot.restore()
    assert model.table.eq(2).all()


def test_an_attribute_that_refers_to_a_weights_data_returns_no_old_weights():
    """The version that they share is not the weight's: it does not show the optimizer's writes."""
    model = Counting()
    model.alias = model.linear.weight.data
    snapshot = Snapshot.of(Stateful(model=model))
    for _ in range(4):
        step(snapshot, model.linear, lambda: None)
        with torch.no_grad():
            model.linear.weight += 1
    snapshot.take()
    before = model.linear.weight.detach().clone()
    snapshot.restore()
    assert torch.equal(model.linear.weight, before)


def step(snapshot, model, write) -> None:
    """A step whose forward does `write`, and whose optimizer writes the bias."""
    snapshot.take()
    write()
    snapshot.record_step_writes()
    with torch.no_grad():
        model.bias += 1


def test_parameters_are_copied_only_once_a_forward_has_written_them():
    model = nn.Linear(2, 2)
    snapshot = Snapshot({"": model})
    for _ in range(6):
        step(snapshot, model, lambda: None)
        assert not snapshot.written
    step(snapshot, model, lambda: model.weight.detach().mul_(2))
    step(snapshot, model, lambda: None)
    assert list(snapshot.written) == ["weight"]
    before = model.weight.detach().clone()
    snapshot.take()
    model.weight.detach().mul_(2)
    snapshot.restore()
    assert not snapshot.lost
    assert torch.equal(model.weight, before)


def test_one_of_two_updates_that_writes_silently_is_remembered():
    model = nn.Linear(2, 2)
    snapshot = Snapshot({"": model}, verified=4)
    for _ in range(2):
        step(snapshot, model, lambda: model.weight.data.mul_(2))
        step(snapshot, model, lambda: None)
    assert list(snapshot.written) == ["weight"]


def test_a_write_without_a_copy_is_lost_and_named():
    model = nn.Linear(2, 2)
    snapshot = Snapshot({"model": model})
    snapshot.take()
    model.weight.detach().mul_(2)
    snapshot.restore()
    assert snapshot.lost == ["model.weight"]
    snapshot.take()
    model.weight.detach().mul_(2)
    snapshot.restore()
    assert not snapshot.lost


def test_all_parameters_are_copied_for_a_trial():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameters, lost in (("trained", ["bias"]), ("all", [])):
        snapshot = Snapshot({"": model})
        with snapshot.undone(parameters), torch.no_grad():
            model.weight.zero_()
            model.bias.add_(1)
        assert snapshot.lost == lost
        assert torch.equal(model.weight, before["weight"])


WRITES = {
    "in place": lambda weight: weight.detach().mul_(-1),
    "through data": lambda weight: weight.data.mul_(-1),
    "another data": lambda weight: setattr(weight, "data", -weight.data),
    "through NumPy": lambda weight: np.negative(weight.detach().numpy(), out=weight.detach().numpy()),
    "one bit": lambda weight: weight.data.view(torch.int32)[0, 0].add_(1),
    "rows exchanged": lambda weight: weight.data.copy_(weight.data.flip(0)),
}


@pytest.mark.parametrize(
    ("write", "layout"),
    [*((write, "contiguous") for write in WRITES), ("one bit", "transposed"), ("one bit", "sliced")],
)
def test_every_write_is_noticed_in_the_first_two_steps(write, layout):
    whole = torch.randn(70, 33)
    weight = {"contiguous": whole, "transposed": whole.T, "sliced": whole[1:, 1:]}[layout]
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    snapshot = Snapshot({"": model})
    snapshot.take()
    assert not snapshot._written()
    WRITES[write](model.weight)
    snapshot.restore()
    assert snapshot.lost == ["weight"]


def test_an_interrupted_take_leaves_nothing_to_return_to():
    model, failing = nn.Linear(2, 2), {"task": Owner(lambda: 1 / 0, lambda state: None, "task")}
    snapshot = Snapshot({"": model}, failing)
    with pytest.raises(ZeroDivisionError):
        snapshot.take()
    with pytest.raises(AssertionError, match="no complete take"):
        snapshot.restore()


def test_copies_whose_allocation_was_interrupted_are_allocated_again(monkeypatch):
    model = nn.BatchNorm1d(2)
    snapshot = Snapshot({"": model}, verified=0)
    snapshot.take()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            snapshot.take("all")
    snapshot.take()  # of the same names as before the error
    model(torch.ones(4, 2))
    snapshot.restore()
    assert int(model.num_batches_tracked) == 0


class State(NamedTuple):
    hidden: torch.Tensor
    steps: list


class CountingLoss:
    """A loss with state in plain attributes, as of a warm-up."""

    def __init__(self):
        self.calls, self.mean, self.by_half = 0, torch.zeros(2), np.zeros(2)

    def __call__(self):
        self.calls += 1
        self.mean += 1
        self.by_half[self.calls % 2] += 1


def test_plain_attributes_of_a_task_are_restored():
    task = CountingLoss()
    snapshot = Snapshot({}, objects={"task": task})
    task()
    snapshot.take()
    alias = task.mean
    for _ in range(2):
        task()
        task.new = 3
        snapshot.restore()
    assert (task.calls, task.mean.tolist(), task.by_half.tolist()) == (1, [1, 1], [0, 1])
    assert task.mean is alias
    assert not hasattr(task, "new")


class MeanTeacher:
    """A loss that copies the model in its first call, since only then there is one, and averages its weights."""

    def __call__(self, model):
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(model).requires_grad_(False)
        for weight, average in zip(model.parameters(), self.teacher.parameters(), strict=True):
            average.data.mul_(0.5).add_(weight.data)


def test_a_module_that_a_task_makes_in_its_first_call_is_restored():
    model, task = nn.Linear(2, 2), MeanTeacher()
    snapshot = Snapshot.of(Stateful(model=model, task=task))
    snapshot.take()
    task(model)
    snapshot.restore()  # the first step fails: nothing is left of its teacher
    assert not hasattr(task, "teacher")

    for _ in range(2):
        snapshot.take()
        task(model)
        snapshot.record_step_writes()
    names = ["task.teacher.bias", "task.teacher.weight"]
    assert sorted(snapshot.changes) == sorted(snapshot.written) == names

    snapshot.take()
    teacher = task.teacher
    before = teacher.weight.clone()
    for _ in range(2):
        task(model)
        task.teacher = nn.Linear(2, 2)
        snapshot.restore()
        assert task.teacher is teacher
        assert torch.equal(teacher.weight, before)
    assert not snapshot.lost


def test_the_contents_of_containers_are_compared():
    """Of a list that stays the same, too, and of tensors in it."""
    model, task = nn.Identity(), CountingLoss()
    model.__class__ = type("Own", (nn.Identity,), {"__module__": "own"})
    model.states, model.rows, model.table = [torch.zeros(2)], {"a": [torch.zeros(2)]}, [0.0] * 5000
    task.states, task.names = (torch.zeros(2),), {"a", "b"}
    snapshot = Snapshot.of(Stateful(model=model, task=task))
    snapshot.take()
    model.states[0] = torch.zeros(2)
    task.states, task.names = (torch.zeros(2),), {"b", "a"}
    assert not snapshot.changed()
    model.rows["a"][0].data.add_(1)
    model.table[-1] = 1.0
    task.states[0].add_(1)
    assert snapshot.changed() == ["model.rows", "model.table", "task.states"]


def test_tensors_in_tuples_are_restored():
    """Those in lists are the user's."""
    model, task = Counting(), CountingLoss()
    tensors = torch.zeros(2), torch.zeros(2)
    model.states = task.states = (tensors[0], (1, tensors[1]))
    task.history = history = [1.0, torch.zeros(2)]
    snapshot = Snapshot.of(Stateful(model=model, task=task), verified=0)
    for _ in range(2):
        snapshot.take()
        for tensor in tensors:
            tensor.add_(1)
        task.states, model.states, task.history = (), None, [*history, 2.0]
        snapshot.restore()
        assert model.states[1][1] is task.states[1][1] is tensors[1]
        assert [tensor.tolist() for tensor in tensors] == [[0, 0], [0, 0]]
        assert task.history is history


def test_a_recomputation_sees_the_tensors_of_tuples_as_they_were():
    model = Counting()
    model.states = deque([1]), State(torch.zeros(2), [2])
    snapshot = Snapshot.of(Stateful(model=model), verified=0)
    snapshot.take()
    state = snapshot.released()
    now = model.states
    now[1].hidden.add_(1)
    with snapshot.replayed(state):
        assert model.states[1].hidden.tolist() == [0, 0]
        assert model.states[1].steps is now[1].steps
    assert model.states is now
    assert now[1].hidden.tolist() == [1, 1]


def test_a_record_that_was_set_aside_outlives_other_takes():
    model = Counting()
    snapshot = Snapshot.of(Stateful(model=model), verified=0)
    record = snapshot.set_aside()
    for _ in range(3):
        with torch.no_grad():
            model(torch.ones(4, 2))
            model.table.add_(1)
        snapshot.take()
    assert snapshot.return_to(record) == []
    assert (model.steps, model.running.tolist(), model.lazy, model.training) == (0, [0, 0], None, True)
    assert int(model.norm.num_batches_tracked) == 0
    assert float(model.table.max()) == 1
    snapshot.take()  # a copy of these values, not of those that were written last
    with torch.no_grad():
        model.table.add_(1)
        model.running.add_(1)
    snapshot.restore()
    assert (float(model.table.max()), model.running.tolist()) == (1, [0, 0])


def test_a_parameter_without_a_copy_in_the_record_is_named_and_has_one_later():
    model = Counting()
    snapshot = Snapshot.of(Stateful(model=model), verified=0)
    for named, moved in ((["model.linear.bias"], 1), ([], 1)):
        record = snapshot.set_aside()
        before = model.linear.bias.detach().clone()
        with torch.no_grad():
            model.linear.bias.add_(1)
        snapshot.record_written()
        assert snapshot.return_to(record) == named
        assert torch.allclose(model.linear.bias, before + (moved if named else 0))


def test_returning_keeps_a_constants_write_that_no_version_shows():
    """A copy that was made before such a write is older than the record."""
    model = Counting()
    snapshot = Snapshot.of(Stateful(model=model), verified=0)
    snapshot.take()
    model.table.data.fill_(3)
    snapshot.return_to(snapshot.set_aside())
    assert float(model.table.max()) == 3
