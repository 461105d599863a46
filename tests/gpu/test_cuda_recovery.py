"""What docs/oom.md and docs/memory.md promise for CUDA: recovery, replay, errors."""

import helpers
import pytest
import runs
import torch
from faults import Fault
from harness import Recorded
from on_gpu import LARGE, LARGE_MODELS, MIB, ON_GPU, command, forget, launched, limit_of, replayed

from trainapp.memory.detection import requested_bytes
from trainapp.oom import find_executable_batch_size, is_out_of_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ENDS = ("train.max_steps=5", "every.save=null")


@pytest.mark.parametrize("model", LARGE_MODELS)
def test_a_run_equals_its_replay_bit_for_bit(tmp_path, model):
    """With deterministic kernels, dropout's generator on the device included; without the schedule it would not."""
    overrides = (*LARGE_MODELS[model], *ENDS, "train.deterministic=true")
    limit = limit_of(tmp_path / "limit", 0.4, *overrides)
    first = launched(tmp_path / "first", *overrides, f"memory.limit={limit}")
    assert first.oom_restarts >= 1
    forget()
    second = replayed(tmp_path / "second", first, *overrides)
    assert second.oom_restarts == 0
    assert second.micro_schedule == first.micro_schedule
    assert runs.differences(model_of(tmp_path / "first"), model_of(tmp_path / "second")) == []
    launched(tmp_path / "whole", *overrides)
    assert runs.differences(model_of(tmp_path / "first"), model_of(tmp_path / "whole"))


def model_of(run_dir):
    return runs.saved(run_dir, 5)["model"]


def test_an_error_in_the_commit_goes_back(tmp_path):
    overrides = (*runs.STEPS_ONLY, *runs.MODELS["mlp"], *ON_GPU, "optimizer.fused=false")
    recorded = Recorded(runs.configure(tmp_path, *overrides), Fault("commit", 3, 1))
    assert [failure.phase for failure in recorded.failures] == ["commit"]
    assert recorded.run.state.progress.step == 4


def test_evaluation_has_a_size_of_its_own(tmp_path):
    """It runs out at a size at which training would not: every sample is counted once, training's size stays."""
    overrides = (*LARGE, "data.val_size=1024", "batch.micro_size=16", "train.max_steps=2", "every.eval=2")
    limit = limit_of(tmp_path / "limit", 1.0, *overrides, "every.eval=null") + 64 * MIB
    free = launched(tmp_path / "free", *overrides)
    capped = launched(tmp_path / "capped", *overrides, f"memory.limit={limit}")
    assert {incident["phase"] for incident in helpers.incidents(tmp_path / "capped")} == {"evaluate"}
    assert capped.micro_size == free.micro_size == 16
    (one,), (other,) = (helpers.evaluations(tmp_path / name) for name in ("free", "capped"))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_the_allocators_error_is_recognised():
    torch.cuda.set_per_process_memory_fraction(512 * MIB / torch.cuda.get_device_properties(0).total_memory)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)
    assert requested_bytes(str(caught.value)) == 600 * MIB


def test_the_decorator_halves_on_a_real_error():
    torch.cuda.set_per_process_memory_fraction(512 * MIB / torch.cuda.get_device_properties(0).total_memory)
    tried = []

    @find_executable_batch_size(starting_batch_size=256)
    def train(batch_size):
        tried.append(batch_size)
        return torch.empty(batch_size * 4 * MIB, dtype=torch.uint8, device="cuda").numel()

    assert train() == 64 * 4 * MIB
    assert tried == [256, 128, 64]


def test_a_dead_context_ends_the_run(tmp_path):
    """A device-side assert, in a process of its own: nothing in it can use the device afterwards."""
    task = ("user_packages=[on_gpu]", "task=on_gpu.past_the_end", "objective='min loss'")
    done = command(tmp_path / "run", "model=mlp", "data=digits", *ON_GPU, *task)
    assert done.returncode == 1
    assert "device-side assert triggered" in done.stderr
    assert helpers.files(tmp_path / "run" / "oom") == set()


def test_exactness_finds_nothing_in_the_models_that_come_with_it(tmp_path):
    """debug=exactness compares each of the first three steps with its repetition, bit for bit."""
    for model in runs.MODELS:
        result = launched(tmp_path / model, *runs.MODELS[model], *ON_GPU, "train.max_steps=4", "debug=exactness")
        assert result.steps == 4, model
