"""Worker processes of the loader."""

import multiprocessing
import random
import subprocess
import sys

import helpers
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from trainapp.data import loader
from trainapp.data.loader import BatchLoader, Request
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


class Views(Dataset):
    """Its batches are views of the data."""

    table = torch.arange(4000.0).reshape(1000, 4)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return self.table[index]

    @staticmethod
    def collate(samples):
        return {"first": samples[0], "all": samples}


def test_a_worker_sends_a_view_without_the_rest_of_the_data():
    """On the old code it copied all of the data to shared memory."""
    loader = BatchLoader(Views(), 0, 1, torch.device("cpu"))
    (micro,) = loader.batches(iter([Request(0, [1, 2])]))
    loader.close()
    first = micro.data["first"]
    assert first.tolist() == [4, 5, 6, 7]
    assert first.untyped_storage().nbytes() == 16
    assert micro.data["all"][0].data_ptr() == first.data_ptr()


class Negatives(Dataset):
    """Draws a number per sample anew in each epoch, as recommenders draw negative samples."""

    def set_epoch(self, epoch):
        self.negatives = np.random.randint(0, 10**6, 8) + random.randint(0, 10**6) + int(torch.randint(10**6, ()))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return int(self.negatives[index])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_data_set_draws_for_an_epoch_is_the_same_in_every_process(workers):
    requests = [Request(epoch, [0, 3, 5]) for epoch in (0, 0, 1, 1, 0)]

    def served(workers):
        torch.manual_seed(random.randrange(10**9))  # another state of the generators
        state = torch.get_rng_state()
        loader = BatchLoader(Negatives(), 7, workers, torch.device("cpu"))
        batches = [micro.data.tolist() for micro in loader.batches(iter(requests))]
        loader.close()
        assert torch.equal(torch.get_rng_state(), state)
        return batches

    batches = served(workers)
    assert batches == served(0)
    assert batches[0] == batches[1] == batches[4]
    assert batches[0] != batches[2] == batches[3]


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


def test_only_tensors_on_the_cpu_are_pinned(monkeypatch):
    """A data set may keep its samples on the GPU."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    on_cpu, elsewhere = torch.zeros(2), torch.zeros(2, device="meta")
    assert loader._pinned(on_cpu) is on_cpu
    assert loader._pinned(elsewhere) is elsewhere
    assert len(pinned) == 1
    assert pinned[0] is on_cpu
