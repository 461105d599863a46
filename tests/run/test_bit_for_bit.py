"""Whether result.json promises that a replay of the run gives the same bits."""

import dataclasses

import helpers
import pytest
import runs
import torch

from trainapp.memory.cpu import CpuMemory
from trainapp.memory.device import DeviceMemory
from trainapp.run.result import why_not_bit_for_bit

MLP = runs.MODELS["mlp"]


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    """By earlier tests of this process."""
    monkeypatch.setattr(DeviceMemory, "reported_refusals", 0)


def test_on_the_cpu_it_does(tmp_path):
    runs.run(tmp_path, *MLP)
    found = helpers.result(tmp_path)
    assert found["bit_for_bit"] is True
    assert "bit_for_bit_note" not in found
    assert found["peak_reserved_bytes"] == found["peak_memory_bytes"]


@pytest.mark.parametrize(
    ("device", "overrides", "hidden", "note"),
    [
        ("cpu", (), False, None),
        ("cpu", (), True, None),
        ("cuda", (), False, "any order (cuda, train.deterministic=false)"),
        ("cuda", ("train.deterministic=true",), False, None),
        ("cuda", ("train.deterministic=true",), True, "an allocation failed and a library caught the error"),
        ("mps", ("train.deterministic=true",), False, "any order (mps)"),
    ],
)
def test_by_device_kernels_and_failures(tmp_path, device, overrides, hidden, note):
    run = runs.prepare(tmp_path, *MLP, *overrides)
    run.close()
    torch.use_deterministic_algorithms(False)
    moved = dataclasses.replace(run, state=dataclasses.replace(run.state, device=torch.device(device)))
    found = why_not_bit_for_bit(moved, hidden)
    assert found is None if note is None else note in found


def test_a_global_batch_that_has_fallen_is_not_replayed(tmp_path):
    run = runs.prepare(tmp_path, *MLP, "oom.keep_global_batch=false")
    run.close()
    assert why_not_bit_for_bit(run, False) is None
    run.set_global_size(8)
    assert "the global batch has fallen to 8" in why_not_bit_for_bit(run, False)


def test_a_hidden_failure_is_remembered_over_a_resume(tmp_path, monkeypatch):
    """In the process that resumes, the allocator counts from 0."""
    with monkeypatch.context() as patched:
        patched.setattr(CpuMemory, "refused_allocations", lambda self: 1)
        runs.run_until(tmp_path / "hidden", 2, *MLP)
    runs.run_until(tmp_path / "clean", 2, *MLP)
    for name, expected in (("hidden", True), ("clean", False)):
        run = runs.prepare(tmp_path / name, *MLP)
        assert run.sizes.hidden_failures is expected
        assert run.history()["hidden_failures"] is expected
        run.close()
