"""Real limits through the real command line, with one model of each kind."""

import dataclasses

import pytest
from helpers import incidents, metrics, result, run_cli, train

from trainapp.run import runner

from .conftest import composed

MODELS = {
    "mlp": ("model=mlp", "model.width=64", "data=digits"),
    "resnet": ("model=resnet", "model.width=4", "model.norm=group", "data=digits", "data.augment=true"),
    "gpt": (
        "model=gpt",
        "model.depth=1",
        "model.width=32",
        "model.heads=2",
        "model.context_length=32",
        "data=synthetic_tokens",
        "data.vocab_size=32",
        "data.size=512",
        "data.min_length=24",
    ),
}
# Bytes between the needs of 8 and of 16 samples.
LIMITS = {"mlp": 173_000, "resnet": 1_000_000, "gpt": 1_870_000}
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
@pytest.mark.parametrize("model", MODELS)
def test_a_limit_on_the_command_line(tmp_path, model):
    limited = (*MODELS[model], *COMMON, f"memory.limit={LIMITS[model]}", "oom.grow=false")
    train(tmp_path / "limited", *limited, env={"TRAINAPP_CACHE": str(tmp_path / "cache")})
    found = result(tmp_path / "limited")
    assert found["oom_restarts"] == len(incidents(tmp_path / "limited")) >= 1
    assert (found["steps"], found["samples"]) == (6, 6 * 64)
    size = found["micro_size"]
    assert size == 8
    assert [record["new_size"] for record in incidents(tmp_path / "limited") if record["phase"] != "evaluate"] == [
        32,
        16,
        8,
    ]
    last = metrics(tmp_path / "limited")[-1]
    assert found["peak_memory_bytes"] <= last["memory/limit"]
    assert all(record["used"] + record["requested"] > record["limit"] for record in incidents(tmp_path / "limited"))
    # Bit-identical to a run configured with these sizes.
    schedule = ",".join(f"{step}:{size}" for step, size in found["micro_schedule"].items())
    told = composed(*MODELS[model], *COMMON, f"batch.micro_schedule={{{schedule}}}")
    assert runner.run(dataclasses.replace(told, run_dir=str(tmp_path / "told"))).oom_restarts == 0
    assert digest(tmp_path / "limited") == digest(tmp_path / "told")


@pytest.mark.slow
def test_an_error_in_backward_leaves_its_graph_to_no_retry(tmp_path):
    """A third of the limit: what torch's engine keeps of a failed backward until the next one."""
    narrow = ("model=resnet", "model.width=8", "data=digits", "precision=bf16", "memory.limit=3460300")
    config = composed(*narrow, *COMMON, "batch.global_size=48", "train.max_steps=1", "every.eval=null")
    assert runner.run(dataclasses.replace(config, run_dir=str(tmp_path))).steps == 1
    assert incidents(tmp_path)[0]["phase"] == "backward"


@pytest.mark.slow
def test_a_limit_that_leaves_nothing(tmp_path):
    done = run_cli(*MODELS["mlp"], *COMMON, "memory.limit=64KiB", f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.returncode == 2
    assert "memory.limit=64.0 KiB" in done.stderr
    assert "Traceback" not in done.stderr
