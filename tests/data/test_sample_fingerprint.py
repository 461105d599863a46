"""Fingerprints of samples: what is compared of any kind of object, and what cannot be."""

import datetime
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from trainapp.data.sample_fingerprint import fingerprint


class Plain:
    def __init__(self, x, y=0):
        self.x, self.y = x, y


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def ring(value):
    first, second = Plain(value), Plain(value)
    first.y, second.y = second, first
    return first


def picture(value, kind="L"):
    image = pytest.importorskip("PIL.Image")
    return image.new(kind, (4, 3), value)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"x": torch.ones(2)}, {"x": torch.ones(2)}, True),
        ({"x": torch.ones(2)}, {"x": torch.tensor([1.0, 2.0])}, False),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2, dtype=torch.cfloat).conj(), True),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), True),
        (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse(), False),
        (torch.zeros(()), torch.zeros(()), True),
        ((1, "a", None), (1, "a", None), True),
        ((1, "a"), (1, "b"), False),
        ((1, 2), (12,), False),
        ([[1], 2], [1, [2]], False),
        (b"ab", b"ac", False),
        (bytearray(b"ab"), bytearray(b"ac"), False),
        (np.array([{"x": 1}]), np.array([{"x": 2}]), False),
        ({"a", "b", "c"}, {"c", "b", "a"}, True),
        ({"a", "b"}, {"a", "c"}, False),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 1), True),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2), False),
        (Plain(torch.ones(2)), Plain(torch.ones(2)), True),
        (Plain(torch.ones(2)), Plain(torch.zeros(2)), False),
        (Slots([1, Slots("a")]), Slots([1, Slots("a")]), True),
        (Slots([1, Slots("a")]), Slots([1, Slots("b")]), False),
        (Slots(1), Plain(1), False),
        (int, float, False),
    ],
)
def test_fingerprints(a, b, same):
    opaque = set()
    assert (fingerprint(a, opaque) == fingerprint(b, opaque)) is same
    assert opaque == set()


def test_objects_that_refer_to_each_other():
    assert fingerprint(ring(1)) == fingerprint(ring(1)) != fingerprint(ring(2))


def test_it_does_not_depend_on_what_is_the_same_object_twice():
    """As a pickle would."""
    text = "a" * 3
    twice, apart = Plain(text, text), Plain("".join(["a"] * 3), "".join(["a"] * 3))
    assert fingerprint(twice) == fingerprint(apart)


def test_images():
    opaque = set()
    assert fingerprint(picture(3)) == fingerprint(picture(3))
    assert len({fingerprint(image, opaque) for image in (picture(3), picture(4), picture(3, "P"))}) == 3
    assert opaque == set()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.Lock(), "_thread.lock"),
        ((number for number in ()), "builtins.generator"),
        (TensorDataset(torch.ones(2)), "torch.utils.data.dataset.TensorDataset"),
        (torch.Generator(), "torch._C.Generator"),
    ],
)
def test_what_cannot_be_compared_is_named(value, name):
    opaque = set()
    fingerprint({"x": 1, "inner": [Plain(value)]}, opaque)
    assert opaque == {name}


def test_the_order_of_a_mapping_does_not_count():
    """Hash randomisation gives `{key: row[key] for key in {"a", "b"}}` another order in each process."""
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"a": 2, "b": 1})
    opaque = set()
    fingerprint({"a": threading.Lock()}, opaque)
    assert opaque == {"_thread.lock"}
