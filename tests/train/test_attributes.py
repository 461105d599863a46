"""What objects hold is restored: slots, NumPy arrays, containers; what cannot be is said."""

import dataclasses
import logging

import numpy as np
import pytest
import runs
import torch
from torch.nn import functional as F

from trainapp.train import attributes, metric_names
from trainapp.train.attributes import Attributes
from trainapp.train.side_effects import untouched

CPU = torch.device("cpu")


class Slotted:
    __slots__ = ("__secret", "calls", "counts", "late", "once")

    def __init__(self):
        self.calls, self.counts, self.once, self.__secret = 0, np.zeros(3), "once", [1]

    def call(self):
        self.calls += 1
        self.counts += 1
        self.late = True
        self.__secret.append(2)
        del self.once

    def held(self):
        return self.calls, self.counts.tolist(), self.__secret, self.once, hasattr(self, "late")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    number: int = 1


class Keeping:
    """A loss that counts its calls, in every way that leaves no trace in a state."""

    def __init__(self):
        self.slotted, self.frozen = Slotted(), Frozen()
        self.histogram, self.by_class = np.zeros((2, 3)), {"a": [np.zeros(2, dtype=np.int64)]}
        self.total, self.bytes = torch.zeros(2), bytearray(b"ab")

    def __call__(self, model, batch):
        self.slotted.call()
        object.__setattr__(self.frozen, "number", 2)
        self.histogram[0] += 1
        self.by_class["a"][0][:] = 5
        self.total += 1
        self.bytes[0] = 0
        logits = model(batch["inputs"])
        return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {"called": torch.ones(())}

    def held(self):
        arrays = [self.histogram.tolist(), self.by_class["a"][0].tolist(), self.total.tolist(), bytes(self.bytes)]
        return [self.slotted.held(), self.frozen.number, *arrays]


BATCH = {"inputs": torch.randn(4, 2), "targets": torch.tensor([0, 1, 2, 0])}


def test_a_block_leaves_no_trace_in_slots_and_arrays():
    task, model = Keeping(), torch.nn.Linear(2, 3)
    before = task.held()
    array, total = task.histogram, task.total
    with untouched(CPU, model=model, task=task):
        task(model, BATCH)
        assert task.slotted.calls == task.histogram[0, 0] == task.total[0] == 1
    assert task.held() == before
    assert task.histogram is array  # others may hold it
    assert task.total is total


def test_asking_for_the_names_of_metrics_leaves_none(tmp_path):
    """Inside of what attributes hold, too."""
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"])
    run.task = task = Keeping()
    before = task.held()
    assert metric_names.metric_names(run) == {"loss", "called"}
    assert task.held() == before
    run.close()


def test_only_numbers_of_data():
    """A cache stays as it is: its parts belong together."""
    data = Slotted()
    kept = Attributes(data, numbers_only=True)
    data.call()
    kept.restore()
    assert (data.calls, data.counts.tolist(), data.late) == (0, [1.0] * 3, True)


def test_arrays_that_cannot_be_written_are_not_copied():
    array = np.zeros(3)
    array.flags.writeable = False
    kept = Attributes([array])
    kept.restore()


@pytest.mark.parametrize("array", [np.zeros((40, 8)), np.zeros((8, 40)).T, np.array([None] * 40), np.zeros(320)])
def test_a_large_array_that_is_written_is_named(caplog, monkeypatch, array):
    monkeypatch.setattr(attributes, "MOST_COPIED", 100)
    caplog.set_level(logging.WARNING)
    Attributes([array]).restore()
    assert not caplog.text
    kept = Attributes([array])
    array[-1] = 7
    kept.restore()
    assert caplog.text.count("has written to a NumPy array of") == 1
    assert "from 100 B on there is no copy" in caplog.text
