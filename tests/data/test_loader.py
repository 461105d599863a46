"""Worker processes of the loader."""

import multiprocessing
import subprocess
import sys

import helpers
import pytest
from torch.utils.data import Dataset

from trainapp.data.workers import build_loader


class Squares(Dataset):
    """Cannot be pickled, as a data set of a notebook often cannot."""

    def __init__(self):
        self.function = lambda index: index * index

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.function(index)


def test_a_data_set_need_not_pickle_unless_the_program_has_another_start_method(monkeypatch):
    assert [*build_loader(Squares(), 1)] == [0, 1, 4]
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert build_loader(Squares(), 1).multiprocessing_context is None  # that of the program


STUCK = """
import ctypes, time
from trainapp.data.workers import build_loader, start_iteration


class Locked(list):
    def __getitem__(self, index):
        if index:
            time.sleep(1.0)  # until the first item is sent
            mutex, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # keeps the GIL: no handler ever runs
            c.pthread_mutex_lock(mutex), c.pthread_mutex_lock(mutex)
        return 0


items = start_iteration(build_loader(Locked([0, 0]), 1))
next(items)
"""


@pytest.mark.slow
def test_a_stuck_worker_ends_with_the_program():
    assert subprocess.run([sys.executable, "-c", STUCK], env=helpers.environment(), timeout=60).returncode == 0
