"""The record that CudaMemory keeps, on an allocator that is played by this file: the real one is in tests/gpu."""

import types

import numpy as np
import pytest
import torch

from trainapp.config.schema import Memory
from trainapp.memory import cuda
from trainapp.memory.categories import Category
from trainapp.memory.timeline import stacked

MIB = 2**20


class Allocator:
    """Answers what CudaMemory asks of torch.cuda. `calls` has the names of the private functions that were called."""

    def __init__(self, monkeypatch, backend="native"):
        self.calls, self.trace, self.blocks = [], [], []
        self.limit = None
        for name, value in {
            "get_device_properties": lambda device: types.SimpleNamespace(total_memory=1024 * MIB),
            "set_per_process_memory_fraction": lambda fraction, device: None,
            "reset_peak_memory_stats": lambda device: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (1024 * MIB, 1024 * MIB),
            "memory_reserved": lambda device: 0,
            "get_allocator_backend": lambda: backend,
            "synchronize": lambda device: self.calls.append(f"synchronize {device}"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self._snapshot)
        self._backend = backend

    def _record(self, enabled="all", max_entries=None, **options):
        self._refuse()
        self.calls.append("stop" if enabled is None else "start")
        self.limit = max_entries or self.limit

    def _snapshot(self, device):
        self._refuse()
        self.calls.append("snapshot")
        segments = [{"device": 0, "blocks": self.blocks}, {"device": 1, "blocks": [block("active_allocated", 999)]}]
        return {"segments": segments, "device_traces": [list(self.trace[-self.limit :])]}

    def _refuse(self):
        if self._backend != "native":
            raise RuntimeError("cudaMallocAsync does not yet support recordHistory.")

    def allocate(self, address, size):
        self.trace.append({"action": "alloc", "addr": address, "size": size})

    def free(self, address, size):
        for action in ("free_requested", "free_completed"):
            self.trace.append({"action": action, "addr": address, "size": size})


def block(state, size):
    return {"state": state, "size": size + 1, "requested_size": size}


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


@pytest.fixture
def memory(allocator):
    return cuda.CudaMemory(torch.device("cuda", 0), Memory())


def fails(memory, work, resident=None):
    """Run `work` in a watched block that runs out of memory."""

    def watched():
        with memory.watch(resident or {}):
            work()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    with pytest.raises(torch.OutOfMemoryError):
        watched()


def test_the_entry_of_a_failed_allocation(memory, allocator):
    """torch gives it no address (torch 2.13, cuda/memory.py, TraceEntry): reading one ended the recovery."""

    def work():
        allocator.allocate(1, MIB)
        allocator.trace.append({"action": "oom", "device_free": 3 * MIB, "size": 2 * MIB})

    fails(memory, work)
    assert memory.events([]) == ([(0, MIB)], {0: Category.ACTIVATIONS})


def test_a_backend_without_a_history(monkeypatch):
    allocator = Allocator(monkeypatch, "cudaMallocAsync")
    memory = cuda.CudaMemory(torch.device("cuda", 0), Memory())
    memory.keep_events = True
    with memory.watch({}):
        assert memory.watching
    fails(memory, lambda: None)
    assert allocator.calls == []
    assert memory.events([]) == ([], {})
    assert not memory.watching


def test_what_is_recorded_is_bounded(memory, allocator):
    fails(memory, lambda: None)
    assert allocator.limit == cuda.MAX_HISTORY <= 20_000
    assert allocator.calls == ["start", "snapshot", "stop"]


def test_a_healthy_step_leaves_a_snapshot_for_a_timeline_only(memory, allocator):
    with memory.watch({}):
        pass
    assert allocator.calls == ["start", "stop"]
    memory.keep_events = True
    with memory.watch({}):
        pass
    assert allocator.calls[2:] == ["start", "snapshot", "stop"]


def test_the_snapshot_is_freed(memory, allocator, tmp_path):
    fails(memory, lambda: allocator.allocate(1, MIB))
    assert memory.dump(tmp_path / "snapshot.pickle")
    memory.forget_record()
    assert memory.events([]) == ([], {})
    assert not memory.dump(tmp_path / "second.pickle")
    fails(memory, lambda: None)
    with memory.watch({}):  # the next block does not keep the last one's
        assert memory.events([]) == ([], {})


def test_an_overflowing_record_still_ends_at_what_is_allocated(memory, allocator, monkeypatch):
    """Only the last entries are kept. What came before them appears as one allocation: no kind goes below zero."""
    monkeypatch.setattr(cuda, "MAX_HISTORY", 5)
    parameter = torch.zeros(MIB // 4)

    def work():
        allocator.allocate(1, 8 * MIB)  # replaced by later entries, and freed below
        allocator.allocate(2, 4 * MIB)  # replaced, and still there at the end
        allocator.allocate(3, 2 * MIB)
        allocator.free(1, 8 * MIB)
        allocator.allocate(4, MIB)
        allocator.allocate(5, MIB)

    allocator.blocks = [block("active_allocated", size * MIB) for size in (1, 4, 2, 1, 1)]
    allocator.blocks.append(block("inactive", 7 * MIB))
    fails(memory, work, {Category.PARAMETERS: [parameter]})
    events, kinds = memory.events([])
    series = stacked(events, kinds)
    assert series[Category.PARAMETERS][0] == MIB
    assert all(np.min(values) >= 0 for values in series.values())
    assert sum(values[-1] for values in series.values()) == 9 * MIB
    assert max(series[Category.ACTIVATIONS]) == (4 + 8 + 2) * MIB


def test_synchronize_waits_for_this_device(memory, allocator):
    memory.synchronize()
    assert allocator.calls == ["synchronize cuda:0"]
