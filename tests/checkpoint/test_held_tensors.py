"""Where tensors may be held beside parameters and buffers."""

import functools
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trainapp.checkpoint import held_tensors


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
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found(place):
    assert any(tensor is T for tensor in held_tensors.held_tensors([Model(PLACES[place])]))
    assert any(tensor is T for tensor in held_tensors.held_tensors([PLACES[place]]))


def test_parameters_and_buffers_are_not():
    assert list(held_tensors.held_tensors([Model()])) == []


def test_long_lists_of_tensors_are_gone_through_and_tables_of_numbers_are_not():
    bank = [torch.zeros(1) for _ in range(5000)]
    assert len(list(held_tensors.held_tensors([bank]))) == 5000
    assert list(held_tensors.held_tensors([[*range(2500), T, *range(2500)]])) == []


def test_a_large_table_hides_nothing_that_is_closer():
    table = [(number, str(number)) for number in range(50_000)]
    uneven = [[number, [object()]] for number in range(50_000)]
    for held in (table, uneven):
        assert list(held_tensors.held_tensors([Record({"a": T, "table": held})])) == [T]
        assert list(held_tensors.held_tensors([held, T])) == [T]
        assert list(held_tensors.held_tensors([Model([held, T])])) == [T]


def test_a_long_dict_that_begins_with_a_number_is_no_table():
    assert len(list(held_tensors.held_tensors([{"step": 1} | {f"b{i}": T for i in range(1500)}]))) == 1500


def test_what_has_no_storage_yet_is_passed_over():
    odd = [nn.parameter.UninitializedParameter(), torch.ones(2, 2).to_sparse(), T]
    found = list(held_tensors.held_tensors([odd]))
    assert len(found) == 2
    assert found[-1] is T


def test_it_ends_in_a_large_data_set(monkeypatch):
    monkeypatch.setattr(held_tensors, "MOST_LOOKED_INTO", 10)
    found = list(held_tensors.held_tensors([[[torch.zeros(1)] for _ in range(100)]]))
    assert 0 < len(found) <= 10
