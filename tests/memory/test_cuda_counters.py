"""What is read from CUDA's allocator, whose counters are planted here: no GPU is needed."""

import types

import pytest
import torch

from trainapp.config import schema
from trainapp.memory.cuda import CudaMemory

GIB = 2**30
CUDA = torch.device("cuda", 0)


@pytest.fixture
def counters(monkeypatch):
    """The allocator's counters, to be changed by a test."""
    found = {
        "allocated_bytes.all.current": 1 * GIB,
        "allocated_bytes.all.peak": 3 * GIB,
        "reserved_bytes.all.current": 4 * GIB,
        "reserved_bytes.all.peak": 5 * GIB,
        "num_alloc_retries": 2,
        "num_ooms": 0,
    }
    answers = {
        "get_device_properties": types.SimpleNamespace(total_memory=8 * GIB),
        "set_per_process_memory_fraction": None,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "get_allocator_backend": "native",
        "mem_get_info": (8 * GIB, 8 * GIB),
        "memory_reserved": 0,
        "memory_stats": found,
        "memory_stats_as_nested_dict": found,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: found["allocated_bytes.all.peak"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: found["reserved_bytes.all.peak"])
    return found


def test_both_peaks_are_reported(counters):
    memory = CudaMemory(CUDA, schema.Memory())
    scalars = memory.window()
    assert (scalars["memory/peak"], scalars["memory/peak_reserved"]) == (3 * GIB, 5 * GIB)
    assert (memory.peak, memory.peak_reserved) == (3 * GIB, 5 * GIB)
    counters |= {"allocated_bytes.all.peak": 2 * GIB, "reserved_bytes.all.peak": 6 * GIB}
    memory.release()
    assert (memory.peak, memory.peak_reserved) == (3 * GIB, 6 * GIB)


def test_laps_of_a_step_belong_to_its_window(counters, monkeypatch):
    """A micro-batch's own peak, which resets the allocator's, is part of what a log step reports."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: GIB)
    memory = CudaMemory(CUDA, schema.Memory())
    assert memory.lap() == (GIB, 3 * GIB)
    counters |= {"allocated_bytes.all.peak": 2 * GIB, "reserved_bytes.all.peak": 4 * GIB}
    scalars = memory.window()
    assert (scalars["memory/peak"], scalars["memory/peak_reserved"]) == (3 * GIB, 5 * GIB)
    assert memory.window()["memory/peak"] == 2 * GIB


def test_before_cuda_has_started_nothing_was_refused(counters):
    counters.clear()
    assert CudaMemory(CUDA, schema.Memory()).refused_allocations() == 0
