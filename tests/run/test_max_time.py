"""`train.max_time`: a run that is out of time is saved, ends with status 75, and is continued by the same command."""

import dataclasses
import os
import time

import helpers
import psutil
import pytest
import runs

import trainapp
from trainapp.errors import UserError
from trainapp.launch import elastic, launch
from trainapp.run import lr_find, runner
from trainapp.signals import TIME_IS_UP, TO_BE_CONTINUED, Interrupted, deadline_of

GPT = (*runs.MODELS["gpt"], "train.max_steps=4", "train.max_time=1h30m")
LATE = 91 * 60  # seconds


def out_of_time(run_dir, *overrides):
    """The status of a run that began long ago: each process of it takes one step."""
    config = runs.configure(run_dir, *GPT, *overrides)
    with pytest.raises(Interrupted) as left:
        runner.run(dataclasses.replace(config, started=time.time() - LATE))
    assert left.value.signal == TIME_IS_UP
    return left.value.code


def test_the_same_command_continues_as_if_nothing_had_been(tmp_path, capsys):
    whole = runs.run(tmp_path / "whole", *GPT)
    assert (whole.steps, whole.ended) == (4, "train.max_steps=4")  # negative control: in time
    for step in (1, 2):
        assert out_of_time(tmp_path / "run") == TO_BE_CONTINUED
        facts = helpers.result(tmp_path / "run")
        assert (facts["steps"], facts["ended"]) == (step, "train.max_time=1h30m")
        assert facts["stopped"]["signal"] == "train.max_time"
        assert "Resume with:" in capsys.readouterr().out
    assert runs.run(tmp_path / "run", *GPT).steps == 4
    for part in ("model", "optimizer", "progress"):
        assert runs.differences(runs.saved(tmp_path / "run", 4)[part], runs.saved(tmp_path / "whole", 4)[part]) == []


def test_unsaved_it_is_not_to_be_continued(tmp_path):
    assert out_of_time(tmp_path, "checkpointing.save=false") == 128 + TIME_IS_UP


def test_a_call_from_python_returns_what_there_is(tmp_path):
    overrides = [*runs.MODELS["mlp"], "train.device=cpu", "memory.guard=false", "train.max_time=0.01s"]
    result = trainapp.train(overrides, run_dir=tmp_path)
    assert (result.steps, result.ended) == (1, "train.max_time=0.01s")


def test_auto_is_before_the_end_of_the_slurm_job(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(UserError, match=r"train.max_time=auto: SLURM_JOB_END_TIME is not set"):
        runs.run(tmp_path, *runs.MODELS["mlp"], "train.max_time=auto")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    now = time.monotonic()
    assert deadline_of("train.max_time", "auto", time.time()) - now == pytest.approx(380, abs=3)
    assert deadline_of("train.max_time", "500s", time.time() - 100) - now == pytest.approx(400, abs=3)
    config = runs.configure(tmp_path, "train.max_time=500s", "mode=lr_find")
    assert lr_find.configured(config, str(tmp_path)).train.max_time is None


def test_workers_that_torchrun_restarts_keep_its_time(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(elastic, "run", lambda config: seen.append(config) or runs.run(tmp_path, *GPT))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    launch.launch(runs.configure(tmp_path, "parallel=ddp", "parallel.devices=2"))
    assert seen[0].started == psutil.Process(os.getppid()).create_time()
