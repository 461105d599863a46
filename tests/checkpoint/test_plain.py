"""Plain values: through a file that may hold nothing else and back, told apart, or refused by one message."""

import io
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from trainapp.checkpoint.plain_values import decoded, digest, encoded
from trainapp.errors import UserError

VALUES = {
    "numbers": [1, 2.5, True, None, 3j, 2**100, float("nan"), "text", b"bytes"],
    "nested": {"a": ({"b": [1, (2, 3)]},), 4: {5, 6}},
    "dicts": [OrderedDict(b=1, a=2), Counter(b=1, a=2)],
    "tensors": {"t": torch.arange(3.0, dtype=torch.bfloat16), "scalar": torch.tensor(1)},
    "sparse": [torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.ones(3), (4,)), torch.eye(3).to_sparse_csr()],
    "size": [torch.Size([2, 3]), torch.float16],
    "array": np.arange(6, dtype=np.uint32).reshape(2, 3).T,
    "empty": [np.zeros((0, 2)), torch.zeros(0), [], {}, set(), torch.Size([])],
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


def test_a_digest_tells_values_apart():
    others = [
        *({"a": value} for value in (1, 1.0, True, [1], (1,), {1}, torch.ones(1), np.ones(1), "1")),
        *({"b": 1}, Counter(a=1), torch.ones(2), torch.ones(2, 1), torch.ones(2).half(), torch.ones(2).to_sparse()),
        *(np.ones(2), np.ones(2, "f4"), [1, 2], [2, 1], [[1], 2], [[1, 2]]),
        *(0.0, -0.0, torch.tensor([0.0]), torch.tensor([-0.0])),
    ]
    assert len({digest(encoded(value, "x")) for value in others}) == len(others)
    assert digest({"a": 1, "b": {0, 8}}) == digest({"b": {8, 0}, "a": 1})


@pytest.mark.parametrize(
    "kept",
    [nn.Linear(2, 2), range(3), deque([1]), defaultdict(int), namedtuple("Pair", "a b")(1, 2), frozenset({1}), b""],
    ids=lambda kept: type(kept).__name__,
)
def test_what_is_not_plain_is_refused_by_name(kept):
    with pytest.raises(UserError, match=r"state\['a'\]\[1\] is a .* or set checkpointing=off"):
        encoded({"a": [1, kept]}, "state")
