"""A change of a value is noticed, wherever in it; an unchanged value is not taken for a changed one."""

import random
from collections import deque

import numpy as np
import pytest
import torch

from trainapp.optim.value_snapshot import fingerprint


class Held:
    def __init__(self):
        self.items, self.own = [1, {"a": torch.zeros(3)}], self


class Slotted:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


def fill(tensor):
    tensor[0] = 1


CASES = {
    "list": (lambda: [1, [2]], lambda v: v[1].append(3)),
    "dict": (lambda: {"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "deque": (lambda: deque([1], 3), lambda v: v.append(3)),
    "tensor": (lambda: torch.zeros(3, dtype=torch.bfloat16), fill),
    "array": (lambda: np.zeros(3), fill),
    "object": (Held, lambda v: fill(v.items[1]["a"])),
    "slots": (Slotted, lambda v: setattr(v, "number", 1)),
    "random": (lambda: random.Random(0), lambda v: v.random()),
    "numpy_random": (lambda: np.random.default_rng(0), lambda v: v.random()),
    "nan": (lambda: [float("nan")], lambda v: v.append(1)),
    "type": (lambda: [1], lambda v: v.__setitem__(0, True)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed_and_none_is_not(name):
    build, change = CASES[name]
    value = build()
    before = fingerprint(value)
    assert fingerprint(value) == before
    change(value)
    assert fingerprint(value) != before


def test_what_counts_by_its_identity():
    for value in (torch.nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1.0), len, Held, (n for n in "ab")):
        assert fingerprint(value) == fingerprint(value)
    model = torch.nn.Linear(2, 2)
    before = fingerprint([model])
    fill(model.weight.data)
    assert fingerprint([model]) == before
