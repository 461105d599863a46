"""What a device has reserved beyond its plan: measured, stored, and used by the next plan."""

import json

import pytest
import runs
import torch

import trainapp
from trainapp.config import compose
from trainapp.paths import user_cache_dir
from trainapp.planning import process, residuals
from trainapp.planning.cuda.devices import MIB
from trainapp.planning.cuda.pretend import can_pretend

NAME = "NVIDIA A100-SXM4-40GB"
STEPS = (*runs.MODELS["gpt"], "batch.micro_size=8", "oom.remember=true", "checkpointing=off", "plan.levers=false")


def config(*overrides):
    return compose.from_command_line([*runs.TINY, *STEPS, *overrides])


def files():
    return sorted((user_cache_dir() / "plan").glob("*.json"))


@pytest.mark.slow
def test_what_was_stored_is_for_this_device_torch_and_class_alone(monkeypatch):
    residuals.store(config(), NAME, 100 * MIB, 164 * MIB)
    assert residuals.recall(config(), ["NVIDIA H200", NAME]) == 64 * MIB
    assert residuals.recall(config("model.width=32", "batch.micro_size=2"), [NAME]) == 64 * MIB  # sizes are not a class
    for other in ("precision=bf16", "optimizer=sgd", "activation_checkpointing=full", "model=mlp"):
        others = () if other != "model=mlp" else ("data=digits",)
        assert residuals.recall(compose.from_command_line([*runs.TINY, other, *others]), [NAME]) == 0, other
    assert residuals.recall(config(), ["NVIDIA H200"]) == 0
    assert residuals.recall(config(), []) == 0
    assert residuals.recall(config("oom.remember=false"), [NAME]) == 0
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    assert residuals.recall(config(), [NAME]) == 0


def test_a_device_that_took_less_than_planned_adds_nothing():
    residuals.store(config(), NAME, 100 * MIB, 90 * MIB)
    assert residuals.recall(config(), [NAME]) == 0
    assert len(files()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", "null", "[" * 100_000, '{"planned_bytes": 1}', '{"planned_bytes": "1", "measured_bytes": 9}',
        '{"planned_bytes": true, "measured_bytes": 9}', '{"planned_bytes": 1, "measured_bytes": 1e400}',
        '{"planned_bytes": 1, "measured_bytes": 99999999999999999999}', '{"planned_bytes": -5, "measured_bytes": 9}',
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(damage):
    residuals.store(config(), NAME, 100, 164)
    assert residuals.recall(config(), [NAME]) == 64
    files()[0].write_text(damage)
    assert residuals.recall(config(), [NAME]) == 0


def test_bytes_that_are_no_text_count_as_none():
    residuals.store(config(), NAME, 100, 164)
    files()[0].write_bytes(b"\xff\xfe\x00")
    assert residuals.recall(config(), [NAME]) == 0


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINAPP_CACHE", str(tmp_path / "file" / "folder"))
    residuals.store(config(), NAME, 100, 164)
    assert residuals.recall(config(), [NAME]) == 0


@pytest.fixture
def ended(tmp_path):
    """A run after its last step."""
    run = runs.prepare(tmp_path, *STEPS)
    for _ in range(3):
        runs.loop.train_step(run)
    yield run
    run.close()


@pytest.mark.slow
def test_a_run_is_compared_with_its_plan_once(ended, monkeypatch):
    """On the CPU a plan is exact. (Of a run on CUDA it is the same, but for the device that is planned for.)"""
    residuals.measure(ended)
    (path,) = files()
    found = json.loads(path.read_text())
    assert found["planned_bytes"] == found["measured_bytes"] == ended.memory.peak_reserved > 0
    assert found["class"]["device"] == "cpu"

    def never(*_, **__):
        raise AssertionError("it is known")

    monkeypatch.setattr(process, "answer_of", never)
    residuals.measure(ended)


def test_a_run_that_says_nothing_is_not_compared(ended, monkeypatch):
    monkeypatch.setattr(residuals, "_with_used_sizes", lambda run: pytest.fail("planned"))
    monkeypatch.setattr(ended.sizes, "oom_restarts", 1)
    residuals.measure(ended)
    monkeypatch.setattr(ended.sizes, "oom_restarts", 0)
    monkeypatch.setattr(ended.sizes.by_update[""], "recorded", {1: {16: 8}, 2: {16: 4}})
    residuals.measure(ended)
    assert files() == []


@pytest.mark.slow
@pytest.mark.skipif(not can_pretend(), reason="fake CUDA needs Linux on x86-64 or aarch64")
def test_a_plan_for_the_device_adds_it():
    overrides = [*runs.TINY, *STEPS, "train.device=auto", "plan.device=a100-40gb"]
    before = trainapp.plan(overrides)
    assert before["residual_bytes"] == 0
    residuals.store(config(), NAME, 100 * MIB, 164 * MIB)
    after = trainapp.plan(overrides)
    assert after["residual_bytes"] == 64 * MIB
    assert after["reserved_bytes"] == before["reserved_bytes"] + 64 * MIB
    assert after["allocated_bytes"] == before["allocated_bytes"]
    assert any("64.0 MiB of what is reserved" in note for note in after["notes"])
    limit = f"memory.limit={before['reserved_bytes'] + 32 * MIB}"
    assert trainapp.plan([*overrides, limit, "oom.remember=false"])["largest_micro_size"] > 0
    assert trainapp.plan([*overrides, limit])["largest_micro_size"] == 0
