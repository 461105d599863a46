"""What a metric keeps beside its declared states: compared with when it was new, and restored."""

from collections import deque
from types import SimpleNamespace

import torch
from torch import nn

from trainapp.hooks.plain_attributes import PlainAttributes


class Outer(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Uncomparable:
    __slots__ = ("values",)

    def __eq__(self, other):
        raise RuntimeError("ambiguous")

    __hash__ = None


def node_with_parent():
    parent = SimpleNamespace(value=1)
    parent.child = SimpleNamespace(parent=parent, value=2)
    return parent


def test_attributes_of_any_kind_are_compared():
    kept = Outer(
        recent=deque([torch.zeros(3), torch.ones(3)]), tree=node_with_parent(), opaque=Uncomparable(), flag=None
    )
    attributes = PlainAttributes(kept)
    assert set(attributes.changed()) == {"opaque"}  # whether it has changed cannot be known
    kept.recent.append(torch.ones(3))
    kept.tree.child.value = 3
    assert set(attributes.changed()) == {"recent", "tree", "opaque"}


def test_an_object_of_two_modules_stays_one():
    shared = []
    metric = Outer(seen=shared, part=Outer(seen=shared))
    attributes = PlainAttributes(metric)
    before = attributes.take()
    shared.append(1)
    attributes.restore(before)
    assert metric.seen == []
    assert metric.seen is metric.part.seen


def test_buffers_are_restored():
    metric = Outer()
    metric.register_buffer("total", torch.zeros(2))
    attributes = PlainAttributes(metric)
    before = attributes.take()
    metric.total += 1
    assert set(attributes.changed()) == {"total"}
    attributes.restore(before)
    assert metric.total.tolist() == [0, 0]
