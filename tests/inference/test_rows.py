"""A file of rows that is continued, over ranks, and appears as a whole."""

import json
import resource

import pytest

from trainapp.errors import TrainingStopped, UserError
from trainapp.inference.rows import RowFile
from trainapp.parallel.ranks import SingleRank

DECIDES = {"checkpoint": "a"}


class OneOfTwo:
    """A rank whose peer has written as many rows; rank 1 gets `answer` of rank 0."""

    world_size = 2

    def __init__(self, rank=0, answer=None):
        self.rank, self.is_rank_zero, self._answer = rank, rank == 0, answer

    def all_gather_object(self, value):
        return [value if isinstance(value, int) or self.is_rank_zero else self._answer, value]


def opened(path, decides=DECIDES, ranks=None, interleaved=False):
    return RowFile(path, decides, ranks or SingleRank(), interleaved, "predict.output")


def rows(count):
    return [{"value": "x" * 20} for _ in range(count)]


def test_a_full_disk_keeps_what_is_written(tmp_path):
    """In the middle of a line, which is cut off afterwards."""
    limits, first = resource.getrlimit(resource.RLIMIT_FSIZE), opened(tmp_path / "a.jsonl")
    first.write(rows(3))
    written = first.partial.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 30, limits[1]))
    try:
        with pytest.raises(TrainingStopped, match=r"cannot be written .* 3 rows are in .*a\.jsonl\..*\.partial"):
            first.write(rows(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first.close()
    assert first.partial.stat().st_size == written + 30
    again = opened(tmp_path / "a.jsonl")
    assert again.written == 3
    assert again.partial.stat().st_size == written
    again.write(rows(1))
    assert again.publish() == 4
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_rows_of_another_configuration_are_not_continued(tmp_path):
    opened(tmp_path / "a.jsonl").write(rows(3))
    assert opened(tmp_path / "a.jsonl", {"checkpoint": "b"}).written == 0
    assert opened(tmp_path / "a.jsonl", DECIDES, OneOfTwo()).written == 0
    assert opened(tmp_path / "a.jsonl").written == 3


def test_a_file_of_something_else_is_not_replaced(tmp_path):
    """Such as a result of the run that the command names."""
    (tmp_path / "result.json").write_text('{"steps": 3}')
    with pytest.raises(UserError, match=r"predict\.output=.*result\.json: exists, and is not a file of rows"):
        opened(tmp_path / "result.json")
    with pytest.raises(UserError, match="exists, and is not a file of rows"):
        opened(tmp_path)


@pytest.mark.parametrize(("interleaved", "order"), [(False, [0, 1, 2, 3]), (True, [0, 2, 1, 3])])
def test_rows_of_two_ranks_in_one_file(tmp_path, interleaved, order):
    """One after the other, or interleaved as of a stream. Values that are not finite keep their note."""
    path, values = tmp_path / "p.jsonl", [0.5, float("nan"), float("inf"), [1.5]]
    for rank in (1, 0):
        own = opened(path, ranks=OneOfTwo(rank), interleaved=interleaved)
        own.write([{"prediction": value} for value in values[2 * rank : 2 * rank + 2]])
    assert own.publish() == 4
    plain = [
        {"prediction": 0.5},
        {"prediction": None, "prediction_note": "nan"},
        {"prediction": None, "prediction_note": "inf"},
        {"prediction": [1.5]},
    ]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [plain[place] | {"index": number} for number, place in enumerate(order)]


def test_all_ranks_stop_with_the_message_of_rank_0(tmp_path):
    """It cannot read the other rank's rows. Those that exist are kept."""
    own = opened(tmp_path / "p.jsonl", ranks=OneOfTwo(0))
    own.write([{"prediction": 1}])
    with pytest.raises(TrainingStopped, match=r"1_of_2.*file system that all of them share") as stopped:
        own.publish()
    other = opened(tmp_path / "p.jsonl", ranks=OneOfTwo(1, (None, stopped.value)))
    with pytest.raises(TrainingStopped, match="file system that all of them share"):
        other.publish()
    assert len(list(tmp_path.glob("*.partial"))) == 2
