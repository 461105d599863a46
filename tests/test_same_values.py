"""Whether two values have the same content."""

import copy
import types
from collections import deque

import numpy as np
import pytest
import torch

from trainapp.same_values import are_same


def tree(number=1.0):
    """Objects that refer to each other, and all kinds of values."""
    node = types.SimpleNamespace(children=[], value=number)
    node.children.append(types.SimpleNamespace(parent=node, seen=deque([torch.ones(2), float("nan")])))
    return {"node": node, "array": np.arange(3), "more": (b"x", {1, 2}, None, torch.float32)}


def test_copies_are_the_same():
    assert are_same(tree(), copy.deepcopy(tree()), unknown=False)
    assert not are_same(tree(), tree(2.0), unknown=True)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2))),
        (np.ones(2), np.ones(2, dtype=np.float32)),
        (1, True),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"b": 1}),
        (deque([1]), deque([1, 2])),
    ],
)
def test_others_are_not(a, b):
    assert are_same(a, copy.deepcopy(a), unknown=False)
    assert not are_same(a, b, unknown=True)


@pytest.mark.parametrize("make", [object, lambda: torch.eye(2).to_sparse()])
def test_what_cannot_be_compared(make):
    a, b = make(), make()
    assert are_same(a, b, unknown=True)
    assert not are_same(a, b, unknown=False)
