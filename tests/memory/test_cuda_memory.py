"""CudaMemory on a device that is played by this file: its cap, counters and record. The real ones are in tests/gpu."""

import gc
import pickle
import types

import pytest
import torch

from trainapp.config.schema import Memory
from trainapp.memory import cuda
from trainapp.memory.cuda import HEADROOM, MOST_FRAMES, CudaMemory

MIB, GIB = 2**20, 2**30
CUDA = torch.device("cuda", 0)


class Device:
    """80 GiB, as `torch.cuda` sees it. Others use `others` bytes, this process has reserved `reserved`, of which
    `cached` is unused. `calls` has what was done, in order.
    """

    total = 80 * GIB

    def __init__(self):
        self.others = self.reserved = self.cached = self.allocated = self.peak = self.peak_reserved = 0
        self.cap, self.backend, self.calls = None, "native", []
        self.most = None

    def get_device_properties(self, device):
        return types.SimpleNamespace(total_memory=self.total)

    def get_allocator_backend(self):
        return self.backend

    def mem_get_info(self, device):
        self.calls.append("measure")
        return self.total - self.others - self.reserved, self.total

    def memory_allocated(self, device):
        return self.allocated

    def memory_reserved(self, device):
        return self.reserved

    def max_memory_allocated(self, device):
        return self.peak

    def max_memory_reserved(self, device):
        return self.peak_reserved

    def reset_peak_memory_stats(self, device):
        pass

    def memory_stats(self, device):
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
            "num_alloc_retries": 2,
        }

    def empty_cache(self):
        self.calls.append("empty")
        self.reserved, self.cached = self.reserved - self.cached, 0

    def set_per_process_memory_fraction(self, fraction, device):
        assert type(fraction) is float
        assert 0 <= fraction <= 1
        self.calls.append("cap")
        self.cap = fraction * self.total

    def record(self, enabled="all", max_entries=None, **options):
        assert self.backend == "native", "cudaMallocAsync does not yet support recordHistory"
        self.calls.append("stop" if enabled is None else "start")
        self.most = max_entries or self.most

    def snapshot(self, device):
        assert self.backend == "native"
        self.calls.append("snapshot")
        return {"segments": [], "device_traces": [[]]}


@pytest.fixture
def device(monkeypatch):
    played = Device()
    for name in vars(Device):
        if not name.startswith("_") and hasattr(torch.cuda, name):
            monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", played.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", played.snapshot)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: played.calls.append("empty host cache"))
    monkeypatch.setattr(gc, "collect", lambda: played.calls.append("collect"))
    return played


# The cap


def test_without_a_limit_the_allocator_refuses_before_the_driver(device):
    device.others = 20 * GIB
    memory = CudaMemory(CUDA, Memory())
    assert memory.enforced == device.cap == 59 * GIB
    assert (memory.limit, memory.budget) == (None, 80 * GIB)  # what sizes are saved for must not vary with others
    device.others, device.reserved = 22 * GIB, 30 * GIB  # what libraries have taken meanwhile, and the model
    memory.enforce()
    assert memory.enforced == device.cap == 57 * GIB
    device.others, device.reserved = 80 * GIB - MIB, 0  # a full device leaves a cap
    memory.enforce()
    assert memory.enforced == MIB - 2**17
    assert HEADROOM == GIB


def test_a_limit_is_the_cap_whatever_is_free(device):
    device.others = 20 * GIB
    for setting, cap in (("8GiB", 8 * GIB), (1.0, 80 * GIB), (0.5, 40 * GIB)):
        memory = CudaMemory(CUDA, Memory(limit=setting))
        assert memory.enforced == memory.limit == device.cap == cap


def test_what_an_earlier_run_has_left_is_freed_first(device):
    device.reserved, device.cached = 70 * GIB, 69 * GIB
    assert CudaMemory(CUDA, Memory()).enforced == 79 * GIB
    assert device.calls == ["collect", "empty", "measure", "cap"]


# Counters


def test_both_peaks_are_reported_with_those_of_laps(device):
    """A micro-batch's own peak, which resets the allocator's, is part of what a log step reports."""
    memory = CudaMemory(CUDA, Memory())
    device.allocated, device.peak, device.peak_reserved = GIB, 3 * GIB, 5 * GIB
    assert memory.lap() == (GIB, 3 * GIB)
    device.peak, device.peak_reserved = 2 * GIB, 4 * GIB
    scalars = memory.window()
    assert (scalars["memory/peak"], scalars["memory/peak_reserved"]) == (3 * GIB, 5 * GIB)
    assert (memory.peak, memory.peak_reserved) == (3 * GIB, 5 * GIB)
    assert memory.window()["memory/peak"] == 2 * GIB
    device.peak, device.peak_reserved = 2 * GIB, 6 * GIB
    memory.release()
    assert (memory.peak, memory.peak_reserved) == (3 * GIB, 6 * GIB)


def test_a_failure_frees_pinned_memory_too(device):
    memory = CudaMemory(CUDA, Memory())
    device.calls.clear()
    memory.release()
    assert device.calls == ["collect", "empty", "empty host cache"]


def test_freed_caches_are_counted(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {"num_alloc_retries": 3})
    assert CudaMemory(CUDA, Memory()).cache_flushes() == 3


def test_a_slow_run_names_what_others_have(device):
    device.others, device.reserved = 20 * GIB, 59 * GIB
    text = CudaMemory(CUDA, Memory()).others_text()
    assert "this run's allocator has 59.0 GiB, others and libraries have 20.0 GiB, and 1.0 GiB are free" in text


# The record


@pytest.fixture
def memory(device):
    made = CudaMemory(CUDA, Memory())
    device.calls.clear()
    return made


def fails(memory):
    """A watched block that runs out of memory."""
    with pytest.raises(torch.OutOfMemoryError), memory.watch({}):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def test_a_backend_without_a_history(device, tmp_path):
    device.backend = "cudaMallocAsync"
    memory = CudaMemory(CUDA, Memory())
    memory.keep_events = True
    with memory.watch({}):
        assert memory.watching
    fails(memory)
    assert not memory.dump(tmp_path / "snapshot.pickle")
    assert not memory.watching


def test_a_snapshot_is_taken_of_a_failure_and_for_a_timeline_and_freed(memory, device, tmp_path):
    with memory.watch({}):
        pass
    assert device.calls == ["start", "stop"]
    memory.keep_events = True
    with memory.watch({}):
        pass
    assert device.calls[2:] == ["start", "snapshot", "stop"]
    memory.keep_events = False
    fails(memory)
    assert device.calls[5:] == ["start", "snapshot", "stop"]
    assert device.most == cuda.MAX_HISTORY <= 20_000
    assert memory.dump(tmp_path / "snapshot.pickle")
    assert not memory.dump(tmp_path / "second.pickle")
    fails(memory)
    with memory.watch({}):  # the next block does not keep the last one's
        assert not memory.dump(tmp_path / "second.pickle")


def test_stacks_in_a_snapshot_are_bounded(memory, device, monkeypatch, tmp_path):
    """Innermost frames first, as torch gives them."""
    stack = [{"name": f"function_{depth}", "filename": "model.py", "line": depth} for depth in range(200)]
    blocks = [{"size": 512, "frames": list(stack)}]
    snapshot = {"segments": [{"blocks": blocks}], "device_traces": [[{"action": "alloc", "frames": list(stack)}]]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: snapshot)
    fails(memory)
    assert memory.dump(tmp_path / "snapshot.pickle")
    written = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert written["segments"][0]["blocks"][0]["frames"] == stack[:MOST_FRAMES]
    assert written["device_traces"][0][0]["frames"] == stack[:MOST_FRAMES]
