"""What outlives a run is read as it was written; a file or directory that is broken is none."""

import pytest

from trainapp.config import remembered

DESCRIPTION = {"model": ["mlp", {"width": 8}], "torch": "2.13.0"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINAPP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_facts_are_found_by_their_description():
    remembered.write("oom", DESCRIPTION, {"micro": 8})
    assert remembered.read("oom", DESCRIPTION) == {"micro": 8}
    assert remembered.read("oom", {**DESCRIPTION, "torch": "2.12.0"}) is None
    assert remembered.read("plan", DESCRIPTION) is None
    remembered.write("oom", DESCRIPTION, {"micro": 4})
    assert remembered.read("oom", DESCRIPTION) == {"micro": 4}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_none(content):
    remembered.write("oom", DESCRIPTION, {"micro": 8})
    remembered.path_of("oom", DESCRIPTION).write_bytes(content)
    assert remembered.read("oom", DESCRIPTION) is None


def test_a_cache_that_cannot_be_written_is_ignored(cache):
    cache.write_text("a file where the directory would be")
    remembered.write("oom", DESCRIPTION, {"micro": 8})
    assert remembered.read("oom", DESCRIPTION) is None
