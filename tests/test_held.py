"""Lists, dicts and sets that modules and tasks hold, and objects without a state dict: restored with the step."""

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import own_counters
import pytest
import torch
from torch import nn

from trainapp.state import held
from trainapp.state.attributes import Attributes
from trainapp.state.contents import Contents
from trainapp.state.snapshot import Snapshot
from trainapp.state.stateful import Stateful


class Pool:
    """A replay buffer with every kind of content."""

    def __init__(self):
        self.rows, self.seen, self.counts = [torch.zeros(2)], {1}, defaultdict(int, a=1)
        self.recent = deque([1, 2], maxlen=2)
        self.order = OrderedDict(a=1, b=2)
        self.table, self.weights, self.total = torch.zeros(3), np.zeros(2), 0
        self.inner = None

    def push(self, value):
        self.rows.append(value)
        self.seen.add(value)
        self.counts["b"] += 1
        self.recent.append(value)
        self.order.move_to_end("a")
        self.table += 1
        self.weights += 1
        self.total += 1
        self.inner = self.inner or Pool()
        self.late = [value]

    def facts(self):
        values = vars(self) | {"table": self.table.tolist(), "weights": self.weights.tolist(), "order": [*self.order]}
        return repr(values)


class Slots:
    """A base without `__dict__`."""

    __slots__ = ("__weakref__", "empty", "rows", "total")

    def __init__(self):
        self.rows, self.total = [], 0

    def push(self, value):
        self.rows.append(value)
        self.total += 1
        self.empty = value

    def facts(self):
        return self.rows[:], self.total, hasattr(self, "empty"), dict(getattr(self, "__dict__", {}))


class SlotsAndDict(Slots):
    """It adds one, which is empty at first."""

    def push(self, value):
        super().push(value)
        self.late = value


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen dataclass, which a task changes nevertheless."""

    rows: list = dataclasses.field(default_factory=list)
    total: int = 0

    def push(self, value):
        self.rows.append(value)
        object.__setattr__(self, "total", self.total + 1)

    def facts(self):
        return self.rows[:], self.total


class Task:
    """A task that holds some: in an attribute, a list, and a closure."""

    def __init__(self, pool):
        self.pool, self.pools = pool, [Pool()]
        self.push_to_closure = self.closure(Pool())

    @staticmethod
    def closure(pool):
        return lambda value: (pool.push(value), pool)[1]

    def pushed(self, value):
        pools = [self.pool, *self.pools, self.push_to_closure(value)]
        for pool in pools[:-1]:
            pool.push(value)
        return pools


@pytest.mark.parametrize("verified", [0, 2])
def test_contents_are_restored_in_place_and_anew_in_each_step(verified):
    task = Task(Pool())
    snapshot = Snapshot.of(Stateful(model=nn.Linear(1, 1), task=task), verified)
    pools = task.pushed(0)
    for value in range(1, 6):
        snapshot.take()
        before = [pool.facts() for pool in pools]
        for _ in range(2):  # any number of times
            task.pushed(value)
            task.pushed(value)
            snapshot.restore()
            assert [pool.facts() for pool in pools] == before
        task.pushed(value)
        snapshot.record_step_writes()
    assert len(pools[0].rows) == 7


@pytest.mark.parametrize("verified", [0, 2])
@pytest.mark.parametrize("kind", [Slots, SlotsAndDict, Frozen])
def test_attributes_in_slots_are_restored(kind, verified):
    task, model = kind(), nn.Linear(1, 1)
    model.__class__ = type("Own", (nn.Linear,), {"__module__": "own"})
    model.pool = kind()
    stateful = Stateful(model=model, task=task)
    snapshot = Snapshot.of(stateful, verified)
    contents = Contents(task=task, model=model)
    before = task.facts()
    snapshot.take()
    for pool in (task, model.pool):
        pool.push(1)
    if verified:
        assert {"task.rows", "task.total", "model.pool.rows", "model.pool.total"} <= set(snapshot.changed())
    snapshot.restore()
    assert (task.facts(), model.pool.facts()) == (before, before)
    task.push(1)
    contents.restore()
    assert task.facts() == before


def test_what_a_checkpoint_lacks_is_named_in_slots_too():
    model = nn.Linear(1, 1)
    model.__class__ = type("Own", (nn.Linear,), {"__module__": "own"})
    model.pool = Slots()
    attributes = Attributes(Stateful(model=model))
    model.pool.push(1)
    assert attributes.changed() == ["pool.empty", "pool.rows", "pool.total"]


def test_what_a_step_adds_or_replaces_is_found_in_the_next():
    task = Task(Pool())
    snapshot = Snapshot.of(Stateful(task=task), verified=0)
    snapshot.take()
    task.pool, task.queue = Pool(), [1]
    task.pools.append(Pool())
    snapshot.take()
    task.pool.push(1)
    task.pools[1].push(1)
    task.queue.append(2)
    snapshot.restore()
    assert (task.pool.total, task.pools[1].total, task.queue) == (0, 0, [1])


def test_nothing_is_looked_at_twice_where_nothing_is_held():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    objects = held.HeldObjects({"model": model}, {})
    assert (objects.containers, objects.attributes) == ({}, {})


CALLS, SHAPE, ROWS = 0, None, []
IN_STATIC_METHOD = IN_PROPERTY = 0


class Latest(OrderedDict):
    """A cache that drops the oldest, by the recipe in Python's documentation."""

    def __init__(self, maxsize, /):
        self.maxsize = maxsize
        super().__init__()

    def __getitem__(self, key):
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if len(self) > self.maxsize:
            del self[next(iter(self))]


class Tally(Counter):
    """A counter whose constructor takes something else."""

    def __init__(self, classes):
        super().__init__(dict.fromkeys(range(classes), 0))


class Log(list):
    """A list that refuses to be extended."""

    def extend(self, values):
        raise TypeError("append instead")


class Subclasses:
    """A task that holds containers whose classes have methods of their own, and an array of objects."""

    def __init__(self):
        self.latest, self.tally, self.log = Latest(3), Tally(4), Log()
        self.replay = np.zeros(4, dtype=object)

    def push(self, value):
        self.latest[value] = value
        self.latest[value]
        self.tally[value % 4] += 1
        self.log.append(value)
        self.replay[value % 4] = torch.full((2,), float(value))

    def facts(self):
        return repr((dict.items(self.latest), self.tally, [*self.log], self.replay))


@pytest.mark.parametrize("verified", [0, 2])
def test_containers_of_classes_with_methods_of_their_own_are_restored(verified):
    task = Subclasses()
    snapshot = Snapshot.of(Stateful(model=nn.Linear(1, 1), task=task), verified)
    for value in range(6):
        snapshot.take()
        before = task.facts()
        for _ in range(2):
            task.push(value)
            task.push(value + 1)
            snapshot.restore()
            assert task.facts() == before
        task.push(value)
        snapshot.record_step_writes()
    assert list(OrderedDict.keys(task.latest)) == [3, 4, 5]
    assert task.tally.total() == 6


class Counts(nn.Linear):
    """A model that counts in global variables, in another module and in its class."""

    calls = 0

    @classmethod
    def count(cls):
        Counts.calls += 1

    @staticmethod
    def count_all():
        global IN_STATIC_METHOD
        IN_STATIC_METHOD += 1

    @property
    def counted(self):
        return IN_PROPERTY

    @counted.setter
    def counted(self, number):
        global IN_PROPERTY
        IN_PROPERTY += number

    def forward(self, inputs):
        global CALLS, SHAPE
        CALLS += 1
        SHAPE = (*inputs.shape,)
        own_counters.CALLS += 1
        self.count()
        self.count_all()
        self.counted = 1
        ROWS.append(1)
        return super().forward(inputs)


@pytest.mark.parametrize("verified", [0, 2])
def test_plain_global_variables_are_restored(verified):
    def counts():
        return CALLS, SHAPE, own_counters.CALLS, Counts.calls, IN_STATIC_METHOD, IN_PROPERTY

    ROWS[:] = []
    model = Counts(1, 1)
    snapshot = Snapshot.of(Stateful(model=model), verified)
    for _ in range(3):
        snapshot.take()
        before = counts()
        for _ in range(2):
            model(torch.zeros(2, 1))
            snapshot.restore()
            assert counts() == before
        model(torch.zeros(2, 1))
        if verified:
            snapshot.record_step_writes()
        assert counts() != before
    assert len(ROWS) == 9  # what is in a global list stays


def test_iterators_that_the_first_steps_advance_are_named():
    task = Task(Pool())
    task.rows, task.pair, task.unused = (i for i in range(9)), [iter([1, 2])], iter([1])
    snapshot = Snapshot.of(Stateful(task=task))
    snapshot.take()
    next(task.rows), next(task.pair[0])
    task.pushed(1)
    snapshot.record_step_writes()
    assert snapshot.advanced_iterators() == ["task.pair", "task.rows"]


def test_what_the_first_steps_change_is_named():
    task = Task(Pool())
    snapshot = Snapshot.of(Stateful(task=task))
    for _ in range(2):
        snapshot.take()
        task.pushed(1)
        snapshot.record_step_writes()
    assert {"task.pool.rows", "task.pool.table", "task.pools.0.total", "task.pool.late"} <= snapshot.changes
    assert snapshot.not_restored() == []


def test_what_is_too_large_is_left_as_it_is_and_named_if_it_changes(monkeypatch):
    monkeypatch.setattr(held, "MOST_COPIED_ITEMS", 100)
    monkeypatch.setattr(held, "MOST_BYTES", 1000)
    task = Task(Pool())
    task.pool.rows, task.pool.vocabulary = list(range(101)), list(range(200))
    task.pool.table, task.pool.constant = torch.zeros(1000), torch.zeros(1000)
    snapshot = Snapshot.of(Stateful(task=task))
    snapshot.take()
    task.pool.push(1)
    snapshot.record_step_writes()
    snapshot.restore()
    assert (len(task.pool.rows), task.pool.table[0], task.pool.total) == (102, 1, 0)
    assert snapshot.not_restored() == ["task.pool.rows", "task.pool.table"]


def test_a_recomputation_sees_containers_as_they_were():
    model = nn.Sequential(nn.Linear(1, 1))
    model.__class__ = type("Own", (nn.Sequential,), {"__module__": "own"})
    model.seen = [1]
    snapshot = Snapshot.of(Stateful(model=model), verified=0)
    snapshot.take()
    state = snapshot.released()
    model.seen.append(2)
    with snapshot.replayed(state):
        assert model.seen == [1]
        model.seen.append(2)
    assert model.seen == [1, 2]
