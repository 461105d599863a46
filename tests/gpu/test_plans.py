"""Plans on a machine with a GPU: for that one, followed by its runs, and what these reserve beyond them."""

import json

import pytest
import runs
import torch
from on_gpu import LARGE_MODELS, forget, limit_of

import trainapp
from trainapp.paths import user_cache_dir
from trainapp.planning import residuals

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_first_run_of_its_class_is_compared_with_its_plan(tmp_path):
    settings = (*LARGE_MODELS["gpt"], "checkpointing=off", "oom.remember=true", "train.max_steps=4")
    result = runs.run(tmp_path / "run", *settings)
    (path,) = (user_cache_dir() / "plan").glob("*.json")
    found = json.loads(path.read_text())
    assert found["measured_bytes"] == result.peak_reserved_bytes
    assert found["planned_bytes"] == pytest.approx(found["measured_bytes"], rel=0.1)
    more = max(0, found["measured_bytes"] - found["planned_bytes"])
    config = runs.configure(tmp_path / "run", *settings)
    assert residuals.recall(config, [torch.cuda.get_device_name()]) == more


def test_a_plan_is_for_this_gpu():
    plan = trainapp.plan(["model=mlp", "plan.levers=false"])
    assert plan["device"]["name"] == torch.cuda.get_device_name()
    assert plan["device"]["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory


STEPS = (*LARGE_MODELS["gpt"], "checkpointing=off", "oom.remember=false", "train.max_steps=4", "every.eval=null")


def test_a_run_starts_with_the_planned_size_or_asks_after_its_first_error(tmp_path):
    limit = limit_of(tmp_path / "limit", 0.5, *STEPS)
    forget()
    largest = trainapp.plan([*STEPS, f"memory.limit={limit}", "plan.levers=false"])["largest_micro_size"]
    assert 1 < largest < 128
    asked = runs.run(tmp_path / "asked", *STEPS, f"memory.limit={limit}")
    assert asked.micro_schedule == {1: largest}
    assert asked.oom_restarts == 1
    forget()
    planned = runs.run(tmp_path / "planned", *STEPS, f"memory.limit={limit}", "batch.micro_size=plan")
    assert planned.micro_schedule == {1: largest}
    assert planned.oom_restarts == 0
