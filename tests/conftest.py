"""Every test has a cache directory of its own: micro-batches remembered by one run would change another's."""

import pytest


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """The directory that $TRAINAPP_CACHE names during the test, for subprocesses too."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TRAINAPP_CACHE", str(folder))
    return folder
