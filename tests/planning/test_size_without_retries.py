"""The first micro-batch size where a failed one is expensive: the largest half of a half that really fits."""

import pytest
import runs
import torch

from trainapp.planning.size_without_retries import planned_size
from trainapp.rng import rng_state
from trainapp.train import loop

GPT = (*runs.MODELS["gpt"], "batch.global_size=16", "train.grad_clip=null")


def measured(folder, size: int) -> int:
    """The peak of a real step in micro-batches of this size."""
    run = runs.prepare(folder / str(size), *GPT, f"batch.micro_size={size}", "memory.limit=1GiB")
    loop.train_step(run)
    run.close()
    return run.memory.peak


def planned(folder, limit: int) -> int | None:
    run = runs.prepare(folder / str(limit), *GPT, f"memory.limit={limit}")
    size = planned_size(run, 16)
    run.close()
    return size


@pytest.mark.slow
def test_the_largest_that_fits(tmp_path):
    peaks = {size: measured(tmp_path, size) for size in (16, 8, 4)}
    assert planned(tmp_path, peaks[16]) == 16
    assert planned(tmp_path, (peaks[16] + peaks[8]) // 2) == 8
    assert planned(tmp_path, (peaks[8] + peaks[4]) // 2) == 4


@pytest.mark.slow
def test_one_where_nothing_fits(tmp_path):
    run = runs.prepare(tmp_path, *GPT)
    run.memory.limit = run.meter.static_bytes + 1
    assert planned_size(run, 16) == 1
    run.close()


@pytest.mark.slow
def test_none_for_a_model_that_cannot_be_traced(tmp_path):
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], "user_packages=[own_tasks]", "task=own_tasks.leaves_torch")
    assert planned_size(run, 16) is None
    run.close()


@pytest.mark.slow
def test_what_a_task_keeps_of_the_trace_is_not_kept_here(tmp_path):
    import own_tasks

    own_tasks.KEPT.clear()
    run = runs.prepare(tmp_path, *runs.MODELS["mlp"], "user_packages=[own_tasks]", "task=own_tasks.keeps_weights")
    assert planned_size(run, 16) == 16
    assert own_tasks.KEPT == {}
    loop.train_step(run)
    assert type(own_tasks.KEPT["weights"]) is torch.Tensor
    run.close()
    own_tasks.KEPT.clear()


@pytest.mark.slow
def test_a_plan_leaves_nothing_behind(tmp_path):
    run = runs.prepare(tmp_path, *GPT)
    before, weights = rng_state(run.state.device), runs.weights(run.state.model)
    torch.manual_seed(5)
    seeded = rng_state(run.state.device)
    assert runs.differences(before, seeded) != []
    planned_size(run, 16)
    assert runs.differences(rng_state(run.state.device), seeded) == []
    assert torch.equal(runs.weights(run.state.model), weights)
    run.close()


@pytest.mark.parametrize("limit", [2**30, 3 * 2**20])
def test_a_run_that_recovers_in_place_is_not_planned(tmp_path, limit):
    run = runs.prepare(tmp_path, *GPT, f"memory.limit={limit}")
    run.close()
    assert (run.sizes.train.size, run.sizes.origin) == (16, "share")
