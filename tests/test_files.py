import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import helpers
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


WRITERS = """
import sys
from pathlib import Path
from trainapp.files import atomic_write
path, content = Path(sys.argv[1]), sys.argv[2] * 300_000
while True:
    if sys.argv[3] == "atomic":
        with atomic_write(path) as file:
            file.write(content)
    else:
        path.write_text(content)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["atomic", "plain"])
def test_several_processes_that_are_killed_leave_one_whole(tmp_path, way):
    """Readers never see a partial or mixed file; with a plain write they do."""
    path = tmp_path / "a.txt"
    command = [sys.executable, "-c", WRITERS, str(path)]
    writers = [subprocess.Popen([*command, letter, way], env=helpers.environment()) for letter in "ab"]
    seen, reads, torn = set(), 0, False
    until = time.monotonic() + 30
    while time.monotonic() < until and not torn and not (way == "atomic" and len(seen) == 2 and reads > 50):
        if path.exists():
            text = path.read_text()
            torn = len(text) != 300_000 or len(set(text)) > 1
            reads += 1
            seen.add(text[:1])
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    assert torn == (way == "plain")
    if way == "atomic":
        assert seen == {"a", "b"}
        assert path.read_text() in ("a" * 300_000, "b" * 300_000)


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
