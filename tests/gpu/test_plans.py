"""Plans on a machine with a GPU: for that one, followed by its runs."""

import pytest
import runs
import torch
from on_gpu import LARGE_MODELS, forget, limit_of

import trainapp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_plan_is_for_this_gpu():
    plan = trainapp.plan(["model=mlp", "plan.techniques=false"])
    assert plan["method"] == "traced"
    assert plan["peak_bytes"] % 512 == 0  # CUDA's allocator rounds each tensor up to so much


STEPS = (*LARGE_MODELS["gpt"], "checkpointing=off", "train.max_steps=4", "every.eval=null")


def test_a_run_with_the_planned_size_fits(tmp_path):
    limit = limit_of(tmp_path / "limit", 0.5, *STEPS)
    forget()
    largest = trainapp.plan([*STEPS, f"memory.limit={limit}", "plan.techniques=false"])["largest_micro_size"]
    assert 1 < largest < 128
    planned = runs.run(tmp_path / "planned", *STEPS, f"memory.limit={limit}", f"batch.micro_size={largest}")
    assert planned.micro_schedule == {1: largest}
    assert planned.oom_restarts == 0
