"""A file of lines that is continued, and appears as a whole."""

import resource

import pytest

from trainapp.errors import TrainingStopped, UserError
from trainapp.inference.lines import opened

FACTS = {"checkpoint": "a"}


def rows(count):
    return [{"value": "x" * 20} for _ in range(count)]


def test_one_process_at_a_time(tmp_path):
    with opened(tmp_path / "a.jsonl", FACTS, "predict.output") as first:
        first.write(rows(2))
        refused = pytest.raises(UserError, match="another process is writing it")
        with refused, opened(tmp_path / "a.jsonl", FACTS, "predict.output"):
            pass
    with opened(tmp_path / "a.jsonl", FACTS, "predict.output") as again:
        assert again.done == 2


def test_a_full_disk_keeps_what_is_written(tmp_path):
    """In the middle of a line, which is cut off afterwards."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path / "a.jsonl", FACTS, "predict.output") as lines:
        lines.write(rows(3))
        written = (tmp_path / "a.jsonl.partial").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (written + 30, limits[1]))
        try:
            with pytest.raises(TrainingStopped, match=r"cannot be written .* 3 lines are in .*a\.jsonl\.partial"):
                lines.write(rows(3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "a.jsonl.partial").stat().st_size == written + 30
    with opened(tmp_path / "a.jsonl", FACTS, "predict.output") as lines:
        assert lines.done == 3
        assert (tmp_path / "a.jsonl.partial").stat().st_size == written
        lines.write(rows(1))
        lines.publish()
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_what_does_not_belong_to_it_is_dropped(tmp_path):
    """Lines of other facts, and a file whose lines are not all there."""
    path, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    with opened(path, FACTS, "predict.output") as lines:
        lines.write(rows(3))
    with opened(path, {"checkpoint": "b"}, "predict.output") as other:
        assert other.done == 0
        other.write(rows(2))
    partial.write_text(partial.read_text().split("\n", 1)[1])
    with opened(path, {"checkpoint": "b"}, "predict.output") as damaged:
        assert damaged.done == 0
    assert partial.stat().st_size == 0
