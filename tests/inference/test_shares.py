"""The lines of several ranks in one file."""

import json

import pytest

from trainapp.errors import TrainingStopped
from trainapp.inference.lines import opened
from trainapp.inference.shares import publish_shares, share_path


class OneOfTwo:
    """A rank whose peer has written as many lines; rank 1 gets `answer` of rank 0."""

    world = 2

    def __init__(self, rank=0, answer=None):
        self.rank, self.is_rank_zero, self._answer = rank, rank == 0, answer

    def all_gather_object(self, value):
        return [value if isinstance(value, int) or self.is_rank_zero else self._answer, value]


def write(path, rank, values):
    with opened(share_path(path, rank, 2), {"rank": rank}, "predict.output") as lines:
        lines.write([{"prediction": value} for value in values])
        return lines


@pytest.mark.parametrize(("interleaved", "order"), [(False, [0, 1, 2, 3]), (True, [0, 2, 1, 3])])
def test_values_that_are_not_finite(tmp_path, interleaved, order):
    """Keep their note, and have one index."""
    path, values = tmp_path / "p.jsonl", [0.5, float("nan"), float("inf"), [1.5]]
    write(path, 1, values[2:])
    with opened(share_path(path, 0, 2), {"rank": 0}, "predict.output") as own:
        own.write([{"prediction": value} for value in values[:2]])
        assert publish_shares(path, own, OneOfTwo(), interleaved, "predict.output") == 4
    plain = [
        {"prediction": 0.5},
        {"prediction": None, "prediction_note": "nan"},
        {"prediction": None, "prediction_note": "inf"},
        {"prediction": [1.5]},
    ]
    pairs = [json.loads(line, object_pairs_hook=list) for line in path.read_text().splitlines()]
    assert all(len(dict(own)) == len(own) for own in pairs)
    assert [dict(own) for own in pairs] == [plain[place] | {"index": n} for n, place in enumerate(order)]


def test_all_ranks_stop_with_the_message_of_rank_0(tmp_path):
    """It cannot read the other rank's lines. Those that exist are kept."""
    path = tmp_path / "p.jsonl"
    with opened(share_path(path, 0, 2), {}, "predict.output") as own:
        own.write([{"prediction": 1}])
        with pytest.raises(TrainingStopped, match=r"rank_1_of_2.*file system that all nodes share") as stopped:
            publish_shares(path, own, OneOfTwo(), False, "predict.output")
    with opened(share_path(path, 1, 2), {}, "predict.output") as own:
        own.write([{"prediction": 2}])
        with pytest.raises(TrainingStopped, match="file system that all nodes share"):
            publish_shares(path, own, OneOfTwo(1, (None, stopped.value)), False, "predict.output")
    assert len(list(tmp_path.glob("*.partial"))) == 2
