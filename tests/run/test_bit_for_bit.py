"""Whether result.json promises that a replay of the run gives the same bits."""

import dataclasses

import helpers
import pytest
import runs
import torch

from trainapp.memory.cpu import CpuMemory
from trainapp.memory.device import DeviceMemory
from trainapp.run.result import why_not_bit_for_bit
from trainapp.train import loop

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
    ("device", "overrides", "note"),
    [
        ("cpu", (), None),
        ("cpu", ("train.compile=true",), "steps run uncompiled while memory is counted"),
        ("cuda", (), "any order (cuda, train.deterministic=false)"),
        ("cuda", ("train.deterministic=true",), None),
        ("mps", ("train.deterministic=true",), "any order (mps)"),
    ],
)
def test_by_device_and_kernels(tmp_path, device, overrides, note):
    run = runs.prepare(tmp_path, *MLP, *overrides)
    run.close()
    torch.use_deterministic_algorithms(False)
    moved = dataclasses.replace(run, state=dataclasses.replace(run.state, device=torch.device(device)))
    found = why_not_bit_for_bit(moved, [])
    assert found is None if note is None else note in found
    assert "does not replay this: one; two" in why_not_bit_for_bit(moved, ["one", "two"])


def test_a_hidden_failure_is_remembered_over_a_resume(tmp_path, monkeypatch):
    """In the process that resumes, the allocator counts from 0."""
    with monkeypatch.context() as patched:
        patched.setattr(CpuMemory, "refused_allocations", lambda self: 1)
        runs.run_until(tmp_path / "hidden", 2, *MLP)
    runs.run_until(tmp_path / "clean", 2, *MLP)
    assert "probably cuDNN" in runs.run(tmp_path / "hidden", *MLP).bit_for_bit_note
    assert runs.run(tmp_path / "clean", *MLP).bit_for_bit


def test_a_global_batch_that_has_fallen_is_noted_for_good(tmp_path):
    fallen = (*MLP, "oom.keep_global_batch=false", "schedule=constant")
    run = runs.prepare(tmp_path, *fallen, "train.max_steps=2")
    loop.train_step(run)
    run.set_global_size(8)
    loop.train(run)
    run.close()
    note = "a schedule of sizes does not replay this: batch.global_size: 8 from step 2 on"
    assert runs.run(tmp_path, *fallen).bit_for_bit_note == note


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (("batch.global_size=32",), "batch.global_size: 32 after step 2, 16 until then"),
        (
            ("data.size=120", "data.on_change=next_epoch"),
            "data: its settings after step 2, others until then; training samples: 120 after step 2, 96 until then",
        ),
        ((), None),
    ],
)
def test_what_a_resume_changes(tmp_path, overrides, note):
    """Also noted by the run that continues the one that changed."""
    images = (*MLP, "data=synthetic_images", "data.size=96")
    runs.run_until(tmp_path, 2, *images)
    runs.run_until(tmp_path, 3, *images, *overrides)
    found = runs.run(tmp_path, *images, *overrides).bit_for_bit_note
    assert found == (note and f"a schedule of sizes does not replay this: {note}")


@pytest.mark.slow
def test_another_number_of_ranks(tmp_path):
    several = (*runs.TINY, *MLP, "parallel=ddp", "parallel.devices=2", "train.max_steps=2", "schedule=constant")
    assert helpers.train(tmp_path, *several).returncode == 0
    assert helpers.result(tmp_path)["bit_for_bit"] is True
    note = runs.run(tmp_path, *MLP, "schedule=constant").bit_for_bit_note
    assert note is not None
    assert "ranks: 1 after step 2, 2 until then" in note


@pytest.mark.slow
def test_evaluations_smaller_micro_batch(tmp_path):
    """Its sizes are not in the schedule."""
    evaluated = (*MLP, "every.eval=2", "batch.micro_size=1")
    need = runs.run(tmp_path / "free", *evaluated, "memory.limit=1GiB", "batch.eval_micro_size=16").peak_memory_bytes
    result = runs.run(tmp_path / "tight", *evaluated, f"memory.limit={need}")
    assert result.oom_restarts > 0
    assert "evaluation's micro-batch 16 since step 2" in result.bit_for_bit_note


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("optimizer.lr=0.1",), "optimizer: its settings after step 2, others until then"),
        (("precision=bf16",), "precision: its settings after step 2, others until then"),
        (("train.grad_clip=null",), "train.grad_clip: None after step 2, 1.0 until then"),
        (("train.max_steps=6",), "train.max_steps: 6 after step 2, 4 until then"),
        (("train.max_steps=6", "every.log=2", "memory.timeline=true"), "train.max_steps: 6 after step 2, 4 until then"),
    ],
)
def test_settings_that_a_resume_changes(tmp_path, overrides, name):
    runs.run_until(tmp_path, 2, *MLP)
    assert runs.run(tmp_path, *MLP, *overrides).bit_for_bit_note == f"a schedule of sizes does not replay this: {name}"
