"""Plain values: through a file that may hold nothing else and back, told apart, or refused by one message."""

import io
import itertools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from trainapp.checkpoint.owner import copied
from trainapp.checkpoint.plain import decoded, digest, encoded
from trainapp.errors import UserError

COO = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.ones(3), (4,))  # not coalesced
VALUES = {
    "numbers": [1, 2.5, True, None, 3j, 2**100, float("nan"), "text", b"bytes"],
    "nested": {"a": ({"b": [1, (2, 3)]},), 4: {5, 6}, (7, 8): frozenset({9})},
    "queue": deque([1, 2, 3], maxlen=3),
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter(b=1, a=2),
    "default": defaultdict(list, a=[1], b=[torch.ones(2)]),
    "tagged": {"trainapp.kind": 1, "items": [2]},
    "keys": {np.int64(3): 1, frozenset({1}): 2},
    "tensors": {"t": torch.arange(3.0, dtype=torch.bfloat16), "scalar": torch.tensor(1)},
    "conjugate": [torch.view_as_complex(torch.ones(3, 2)).conj(), torch.view_as_complex(torch.ones(3, 2)).conj().imag],
    "sparse": [COO, torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc()],
    "size": [torch.Size([2, 3]), torch.float16],
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "empty": [np.zeros((0, 2)), torch.zeros(0), [], {}, set(), b"", {b"": ""}, torch.Size([])],
    "scalar": np.float32(1.5),
    "generator": np.random.default_rng(0).bit_generator.state,
    "legacy": np.random.RandomState(0).get_state(),
}


@pytest.mark.parametrize("name", VALUES)
def test_they_survive_a_file_that_may_hold_nothing_else(name):
    file = io.BytesIO()
    torch.save(encoded(VALUES[name], "x"), file)
    file.seek(0)
    back = decoded(torch.load(file, weights_only=True))
    assert digest(encoded(back, "x")) == digest(encoded(VALUES[name], "x"))
    assert type(back) is type(VALUES[name])
    assert digest(encoded(copied(VALUES[name]), "x")) == digest(encoded(VALUES[name], "x"))


def test_containers_come_back_as_they_were():
    back = decoded(encoded(VALUES["default"], "x"))
    assert back["new"] == []
    counter = decoded(encoded(VALUES["counter"], "x"))
    counter.update("a")
    assert counter == Counter(a=3, b=1)
    assert list(decoded(encoded(VALUES["ordered"], "x"))) == ["b", "a"]
    assert decoded(encoded(VALUES["keys"], "x")) == VALUES["keys"]
    assert decoded(encoded(VALUES["tagged"], "x")) == VALUES["tagged"]


def test_what_was_saved_before_is_still_read():
    """Each dict as pairs in a dict with a tag, or as it was."""
    assert decoded(
        {"trainapp.kind": "dict", "items": [["a", {"trainapp.kind": "set", "items": [1], "most": None}]]}
    ) == {"a": {1}}
    assert decoded({"trainapp.kind": "list", "items": [1, 2], "most": None}) == [1, 2]
    assert decoded({"a": {1, 2}}) == {"a": {1, 2}}


def test_a_digest_tells_values_apart():
    others = [
        *({"a": value} for value in (1, 1.0, True, [1], (1,), {1}, frozenset({1}), torch.ones(1), np.ones(1), "1")),
        *({"b": 1}, Counter(a=1), OrderedDict(a=1), defaultdict(int, a=1), defaultdict(float, a=1)),
        *(
            torch.ones(2),
            torch.ones(2, 1),
            torch.ones(2).half(),
            torch.ones(2).to_sparse(),
            np.ones(2),
            np.ones(2, "f4"),
        ),
        *([1, 2], [2, 1], [[1], 2], [[1, 2]], OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), deque([1]), deque([1], 1)),
        *(0.0, -0.0, torch.tensor([0.0]), torch.tensor([-0.0])),
    ]
    assert len({digest(encoded(value, "x")) for value in others}) == len(others)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({0, 8}, {8, 0}), ({1: {0, 8}, (2,): 3}, {(2,): 3, 1: {8, 0}})],
)
def test_as_for_equality_some_orders_do_not_count(first, second):
    assert digest(encoded(first, "x")) == digest(encoded(second, "x"))


UNPLAIN = (
    nn.Linear(2, 2),
    torch.Generator(),
    range(3),
    defaultdict(lambda: 0),
    namedtuple("Pair", "a b")(1, 2),
    np.ma.masked_array([1, 2], mask=[True, False]),
    np.array([None]),
    type("Subclass", (torch.Tensor,), {})(2),
)


@pytest.mark.parametrize("kept", UNPLAIN, ids=lambda kept: type(kept).__name__)
def test_what_is_not_plain_is_refused(kept):
    with pytest.raises(UserError, match=r"state\['a'\]\[1\](, with .*,)? is a .* or set checkpointing=off"):
        encoded({"a": [1, kept]}, "state")


def test_for_comparing_alone_objects_may_stay():
    """The options of an optimizer may be functions, which a checkpoint need not hold as long as they do not change."""
    lenient = [
        digest(encoded(value, "x", strict=False))
        for value in ([len, 1], [len, 1], [max, 1], [len, 2], defaultdict(lambda: 0), UNPLAIN[4])
    ]
    assert lenient[0] == lenient[1]
    assert all(a != b for a, b in itertools.combinations(lenient[1:], 2))
    held = defaultdict(lambda: 0)
    before = digest(encoded(held, "x", strict=False))
    held["a"] += 1
    assert digest(encoded(held, "x", strict=False)) != before
