"""A run of one process that memory has broken goes on in a new one, which takes the broken one's place."""

import json
import sys
from types import SimpleNamespace

import helpers
import psutil
import pytest
import runs
from helpers import run_cli

from trainapp.launch import launch
from trainapp.run import directory, runner

BREAKS = '''
from pathlib import Path

import torch
from torch.nn import functional as F

STRUCK = Path("struck")  # in the working directory: by an earlier process


class Breaks:
    """Cross-entropy. In the third step, once, the driver refuses to map memory."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        logits = model(batch["inputs"])
        if model.training:
            self.calls += 1
            if self.calls == 5 and not STRUCK.exists():
                STRUCK.touch()
                raise RuntimeError("CUDA driver error: out of memory")
        return F.cross_entropy(logits, batch["targets"], reduction="sum"), len(logits), {}
'''
MLP = (*runs.MODELS["mlp"], "task=breaks.Breaks", "user_packages=[breaks]", "train.device=cpu", "batch.global_size=16")
STEPS = ("train.max_steps=6", "train.max_epochs=null", "every.log=1", "every.save=2", "every.eval=null", "tracker=[]")
RUN = (*MLP, *STEPS, "batch.micro_size=8", "hydra.run.dir=run")


@pytest.mark.slow
@pytest.mark.parametrize("save", ["every.save=2", "every.save=null"], ids=["from a checkpoint", "from the start"])
def test_the_command_finishes_the_run(tmp_path, save):
    """With the smaller size, and the losses of a run that nothing has broken."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    command = [sys.executable, "-u", "-m", "trainapp"]
    done = run_cli(*RUN, save, cwd=tmp_path, command=command)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert "a new process continues from the last checkpoint with micro-batch 4 instead of 8" in printed

    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["steps"], result["oom_restarts"]) == (6, 1)
    losses = [line["loss"] for line in helpers.metrics(tmp_path / "run")]
    undisturbed = run_cli(*RUN, save, "hydra.run.dir=undisturbed", cwd=tmp_path, command=command)
    assert undisturbed.returncode == 0, undisturbed.stderr
    wanted = [line["loss"] for line in helpers.metrics(tmp_path / "undisturbed")]
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_what_an_earlier_run_has_saved_is_not_adopted(tmp_path):
    """Before it has saved one itself, a run that is told to begin anew begins anew in the new process, too. The new
    process has the time limit of the old one, and none of its loader workers is left.
    """
    (tmp_path / "breaks.py").write_text(BREAKS)
    command = [sys.executable, "-u", "-m", "trainapp"]
    (tmp_path / "struck").touch()
    earlier = run_cli(*RUN, "every.save=2", cwd=tmp_path, command=command)
    assert earlier.returncode == 0, earlier.stderr
    wanted = [line["loss"] for line in helpers.metrics(tmp_path / "run")]

    (tmp_path / "struck").unlink()
    anew = ("every.save=null", "checkpointing.resume=none", "data.num_workers=2", "train.max_time=1h")
    done = run_cli(*RUN, *anew, cwd=tmp_path, command=command)
    assert done.returncode == 0, done.stderr
    assert "a new process continues from the last checkpoint" in done.stdout + done.stderr
    losses = [line["loss"] for line in helpers.metrics(tmp_path / "run")]
    assert losses == pytest.approx(wanted, rel=1e-5)  # a resumed run would go on from the last step
    assert len(losses) == 6
    assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_restarted_workers_do_not_adopt_it_either(tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS)
    command = [sys.executable, "-u", "-m", "trainapp"]
    workers = ("parallel=ddp", "parallel.devices=2", "batch.micro_size=4")
    (tmp_path / "struck").touch()
    earlier = run_cli(*RUN, *workers, cwd=tmp_path, command=command)
    assert earlier.returncode == 0, earlier.stderr
    wanted = [line["loss"] for line in helpers.metrics(tmp_path / "run")]

    (tmp_path / "struck").unlink()
    done = run_cli(*RUN, *workers, "every.save=null", "checkpointing.resume=none", cwd=tmp_path, command=command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "struck").exists()
    losses = [line["loss"] for line in helpers.metrics(tmp_path / "run")]
    assert losses == pytest.approx(wanted, rel=1e-5)  # a resumed run would go on from the last step


def test_its_time_counts_from_the_start_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv(directory.REPLACES_A_PROCESS, directory.HAS_SAVED)
    started = []
    monkeypatch.setattr(runner, "run", lambda config: started.append(config.started) or SimpleNamespace(objective=None))
    launch.launch(runs.configure(tmp_path, *runs.MODELS["mlp"], "train.max_time=1h"))
    assert started == [psutil.Process().create_time()]
