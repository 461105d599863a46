"""Plans on a machine with a GPU: how one is asked for, and what runs reserve beyond them. Skipped without a GPU."""

import json
import re

import pytest
import runs
import torch
from on_gpu import LARGE_MODELS

import trainapp
from trainapp.errors import UserError
from trainapp.paths import user_cache_dir
from trainapp.plan import residuals

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


def test_the_message_names_this_gpu():
    settings = ["model=mlp", "plan.levers=false"]
    with pytest.raises(UserError, match=r"or name the device: plan\.device=") as refused:
        trainapp.plan(settings)
    (named,) = re.findall(r"plan\.device=\S+", str(refused.value))
    plan = trainapp.plan([*settings, named])
    assert plan["device"]["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
