import json
import math
import os
import stat
from pathlib import Path

import pytest

from trainapp.files import atomic_write, strict_json


def test_the_new_content_replaces_the_old_at_the_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
        assert Path(file.name).parent == tmp_path  # a rename across file systems is a copy
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_of_several_writers_the_last_wins_whole(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write("a" * 10)
        second.write("b" * 5)
    assert path.read_text() == "a" * 10


def write_half(path, error):
    with atomic_write(path) as file:
        file.write("new")
        raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_all_is_as_before(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error):
        write_half(path, error)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_as_readable_as_any_other_file(tmp_path):
    with atomic_write(tmp_path / "a.txt"):
        pass
    (tmp_path / "b.txt").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.txt", "b.txt")]
    assert modes[0] == modes[1]


def test_sync_writes_the_content_before_the_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, n=name, call=original: (calls.append(n), call(*args)))
    with atomic_write(tmp_path / "a.txt", sync=True) as file:
        file.write("new")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the directory
    with atomic_write(tmp_path / "a.txt") as file:
        file.write("new")
    assert calls[3:] == ["replace"]


# JSON


def strict(text: str):
    """As a reader that follows the standard."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_with_the_reason():
    value = {"a": 1.5, "b": math.nan, "c": {"d": [math.inf, 2], "e": -math.inf}, 3: (1, math.nan)}
    assert strict(strict_json(value)) == {
        "a": 1.5, "b": None, "b_note": "nan", "c": {"d": [None, 2], "e": None, "e_note": "-inf"}, "3": [1, None],
    }  # fmt: skip
    with pytest.raises(AssertionError):  # what Python does by itself
        strict(json.dumps(value))
    assert strict(strict_json({"b": math.nan, "b_note": "why"})) == {"b": None, "b_note": "why"}  # its own stays
