"""Plans for the GPU of this machine, with one that torch only says it has: tests/gpu has them with a real one."""

import json
import logging
import os
from types import SimpleNamespace

import pytest
import runs
import torch
from helpers import incidents, run_cli

import trainapp
from trainapp.config import compose
from trainapp.planning import own_device
from trainapp.planning.cuda.pretend import can_pretend
from trainapp.run import runner

NAME = "NVIDIA A100-SXM4-80GB"
BYTES = 80 * 2**30
HERE = f"{BYTES}@8.0 {NAME}"
# Of a process that may see devices: torch says that there are two.
GPUS = f"""
import os
if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    import types
    import torch
    here = types.SimpleNamespace(total_memory={BYTES}, major=8, minor=0, name={NAME!r})
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
    torch.cuda.current_device, torch.cuda.get_device_properties = lambda: 0, lambda device=None: here
"""
GPT = (*runs.TINY, *runs.MODELS["gpt"], "batch.global_size=32", "plan.levers=false", "train.device=auto")

pytestmark = pytest.mark.skipif(not can_pretend(), reason="needs Linux")


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """The environment of commands on a machine with GPUs."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(GPUS)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return {"PYTHONPATH": path}


def planned_by_command(folder, environment, *overrides):
    done = run_cli(*overrides, "mode=plan", f"hydra.run.dir={folder}", cwd=folder.parent, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "plan.json").read_text())


def test_a_machine_with_a_gpu_plans_for_it(tmp_path, gpus):
    printed, facts = planned_by_command(tmp_path / "own", gpus, *GPT)
    assert f"on {NAME}, predicted without it, with expandable segments" in printed
    assert facts["device"] | {"memory_bytes": BYTES, "name": NAME} == facts["device"]
    named = trainapp.plan([*GPT, f"plan.device={BYTES}@8.0"])
    for key in ("certainty", "peak_bytes", "reserved_bytes", "limit_bytes", "largest_micro_size"):
        assert facts[key] == named[key], key
    assert facts["peak_bytes"] != trainapp.plan(GPT)["peak_bytes"]  # of the CPU


def test_it_knows_how_many_gpus_it_has(tmp_path, gpus):
    _, facts = planned_by_command(tmp_path / "own", gpus, *GPT, "parallel=ddp")
    assert facts["ranks"]["world"] == 2
    assert facts["device"]["name"] == NAME


def test_the_cpu_can_still_be_planned_there(tmp_path, gpus):
    _, facts = planned_by_command(tmp_path / "own", gpus, *GPT, "train.device=cpu")
    assert facts["device"] is None
    assert facts["peak_bytes"] == trainapp.plan(GPT)["peak_bytes"]


def on_a_gpu(monkeypatch, config, limit):
    """A run whose device is a GPU, as far as `config_to_plan` looks."""
    properties = SimpleNamespace(total_memory=BYTES, major=8, minor=0, name=NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    state = SimpleNamespace(device=torch.device("cuda", 0))
    return SimpleNamespace(config=config, state=state, memory=SimpleNamespace(enforced=limit))


def test_a_run_on_a_gpu_plans_within_what_it_may_reserve_there(monkeypatch):
    config = compose.from_command_line([*GPT, "plan.device=t4-16gb", "plan.world=4"])
    asked = own_device.config_to_plan(on_a_gpu(monkeypatch, config, 3 * 2**30))
    assert (asked.plan.device, asked.plan.world, asked.memory.limit) == (HERE, None, 3 * 2**30)
    assert asked.train.device == "auto"
    on_cpu = own_device.config_to_plan(
        SimpleNamespace(config=config, state=SimpleNamespace(device=torch.device("cpu")))
    )
    assert (on_cpu.plan.device, on_cpu.memory.limit, on_cpu.train.device) == (None, None, "cpu")


@pytest.fixture
def for_a_gpu(monkeypatch):
    """Runs on the CPU ask as if they were on a GPU, so with sizes that fit there: a step has more in memory."""

    def config_to_plan(run):
        asked = own_device.config_to_plan(run)
        run = on_a_gpu(monkeypatch, asked, run.memory.limit)
        return own_device.config_to_plan(run)

    monkeypatch.setattr(runner, "config_to_plan", config_to_plan)


# Above the workspaces of cuBLAS, and below what all samples need.
ROOM = ("model.width=64", "model.context_length=64", "batch.global_size=512", "data.size=512", "memory.limit=120MiB")
ENDS = ("train.device=cpu", "train.max_steps=3", "checkpointing=off")
RUN = (*GPT, *ROOM, *ENDS)


def largest_there():
    return trainapp.plan([*RUN, f"plan.device='{HERE}'", "train.device=auto"])["largest_micro_size"]


def test_a_run_starts_with_the_largest_size_that_fits_there(tmp_path, for_a_gpu, caplog):
    caplog.set_level(logging.INFO)
    ended = runs.run(tmp_path / "run", *RUN, "batch.micro_size=plan")
    assert ended.micro_schedule == {1: largest_there()}
    assert incidents(tmp_path / "run") == []
    assert "as planned in" in caplog.text
