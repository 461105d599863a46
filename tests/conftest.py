"""Every test has a cache directory of its own: micro-batches remembered by one run would change another's."""

import pytest


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """The directory that $TRAINAPP_CACHE names during the test, for subprocesses too."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TRAINAPP_CACHE", str(folder))
    return folder


# The longest first, so that no process is left with one of them at the end.
LONGEST = ("test_readme.py", "test_faults.py", "test_out_of_memory.py", "test_equality.py", "test_cli.py")


def pytest_collection_modifyitems(items):
    """The order of the files; within each of them it stays."""
    places = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
