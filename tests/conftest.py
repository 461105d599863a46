"""Every test has a separate cache directory, for tokens of texts, and runs on one thread."""

import os
import sys

import pytest

# As scripts/test sets it, so that plain `pytest` computes the same: several threads round sums in another order, and
# slow down tests that wait for each other. Torch reads it when it is imported, here and in subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "torch" in sys.modules:  # by a plugin of pytest's
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """The directory set as $TRAINAPP_CACHE during the test, for subprocesses too."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TRAINAPP_CACHE", str(folder))
    monkeypatch.setenv("WANDB_MODE", "offline")  # nothing leaves this machine
    return folder


@pytest.fixture(scope="module")
def one_thread():
    """For runs in this process: other tests need the cores, and small tensors gain nothing from threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_pictures(monkeypatch):
    """Drawing a picture costs more than a tiny run; oom/test_report.py covers the drawing."""
    from trainapp.tracking.tracker import Tracker

    monkeypatch.setattr(Tracker, "queue_picture", lambda *_: None)


@pytest.fixture(scope="session")
def pool():
    """Processes for several ranks, started when a test needs them."""
    from parallel.pool import Pool

    workers = Pool()
    yield workers
    workers.close()


# Longest first, so that no process ends up with one of them last.
LONGEST = (
    "test_golden.py",
    "test_pairs.py",
    "test_sweeps.py",
    "test_faults.py",
    "test_readme.py",
    "test_zoo.py",
    "test_benchmarks.py",
    "test_out_of_memory.py",
    "test_check_gpu.py",
    "test_ranks.py",
    "test_launch.py",
    "test_signals.py",
    "test_packaging.py",
    "test_extending.py",
    "test_fuzz.py",
    "test_ranking.py",
    "test_planned_ranks.py",
    "test_equality.py",
    "test_cli.py",
    "test_benchmark_oom.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Order the files; tests within a file keep their order."""
    places = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
