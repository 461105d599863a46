"""Real limits; other models: test_recovery.py."""

import dataclasses

import pytest
from helpers import incidents, metrics, result, train

from trainapp.run import runner

from .conftest import composed

RESNET = ("model=resnet", "model.width=4", "model.norm=group", "data=digits", "data.augment=true")
LIMIT = 1_000_000  # bytes, between the needs of 8 and of 16 samples
COMMON = (
    "train.device=cpu",
    "train.max_epochs=null",
    "train.max_steps=6",
    "batch.global_size=64",
    "every.log=1",
    "every.eval=6",
    "checkpointing=off",
)


def digest(run_dir) -> list[float]:
    """The logged numbers that are functions of the weights."""
    return [line["loss"] for line in metrics(run_dir)] + [line["grad_norm"] for line in metrics(run_dir)]


@pytest.mark.slow
def test_a_limit_on_the_command_line(tmp_path):
    limited = (*RESNET, *COMMON, f"memory.limit={LIMIT}", "oom.grow=false")
    train(tmp_path / "limited", *limited, env={"TRAINAPP_CACHE": str(tmp_path / "cache")})
    found = result(tmp_path / "limited")
    assert found["oom_restarts"] == len(incidents(tmp_path / "limited")) >= 1
    assert (found["steps"], found["samples"]) == (6, 6 * 64)
    assert found["micro_size"] == 8
    trained = [record for record in incidents(tmp_path / "limited") if record["phase"] != "evaluate"]
    assert [record["new_size"] for record in trained] == [32, 16, 8]
    last = metrics(tmp_path / "limited")[-1]
    assert found["peak_memory_bytes"] <= last["memory/limit"]
    assert all(record["used"] + record["requested"] > record["limit"] for record in incidents(tmp_path / "limited"))
    # Bit-identical to a run configured with these sizes.
    schedule = ",".join(f"{step}:{size}" for step, size in found["micro_schedule"].items())
    told = composed(*RESNET, *COMMON, f"batch.micro_schedule={{{schedule}}}")
    assert runner.run(dataclasses.replace(told, run_dir=str(tmp_path / "told"))).oom_restarts == 0
    assert digest(tmp_path / "limited") == digest(tmp_path / "told")


@pytest.mark.slow
def test_an_error_in_backward_leaves_its_graph_to_no_retry(tmp_path):
    """A third of the limit: what torch's engine keeps of a failed backward until the next one."""
    narrow = ("model=resnet", "model.width=8", "data=digits", "precision=bf16", "memory.limit=3460300")
    config = composed(*narrow, *COMMON, "batch.global_size=48", "train.max_steps=1", "every.eval=null")
    assert runner.run(dataclasses.replace(config, run_dir=str(tmp_path))).steps == 1
    assert incidents(tmp_path)[0]["phase"] == "backward"
