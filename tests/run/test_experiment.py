"""A run directory belongs to one experiment: other settings that change the result are refused there."""

import json
import shutil
import subprocess
import sys

import helpers
import pytest
import runs

from trainapp.errors import UserError
from trainapp.launch import launch
from trainapp.run import experiment

MLP = (*runs.MODELS["mlp"], "train.max_steps=2", "every.eval=1", "objective=min loss", "optimizer.lr=0.01")
OFF = (*MLP, "checkpointing=off")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """The launcher sets what torch reads at its start."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")


def contents(folder):
    """Every file with its bytes and its time."""
    return {name: ((folder / name).read_bytes(), (folder / name).stat().st_mtime_ns) for name in helpers.files(folder)}


def refusal(run_dir, *overrides):
    """The message where the launcher refuses these settings, None where it would train."""
    try:
        experiment.require_same(runs.configure(run_dir, *overrides))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("settings", [MLP, OFF], ids=["checkpoint", "result alone"])
def test_the_launcher_refuses_another_rate(tmp_path, settings):
    """As in every job of a sweep. The old result would be returned as that of the new settings."""
    runs.run(tmp_path, *settings)
    before = contents(tmp_path)
    with pytest.raises(UserError) as refused:
        launch.launch(runs.configure(tmp_path, *settings, "optimizer.lr=0.5", "train.seed=3", "every.log=2"))
    assert str(refused.value).splitlines()[:3] == [
        f"hydra.run.dir={tmp_path}: this directory belongs to a run of other settings, which change the result:",
        "  optimizer.lr: 0.01 before, 0.5 now",
        "  train.seed: 0 before, 3 now",
    ]
    assert f"checkpointing.resume={tmp_path}" in str(refused.value)
    assert contents(tmp_path) == before


def test_without_the_check_the_old_result_is_returned_as_the_new_one(tmp_path, monkeypatch):
    """Negative control."""
    first = runs.run(tmp_path, *MLP)
    monkeypatch.setattr(experiment, "require_same", lambda *_, **__: None)
    assert launch.launch(runs.configure(tmp_path, *MLP, "optimizer.lr=0.5")) == first.objective


def test_the_same_experiment_goes_on(tmp_path):
    """Its end, cadences, limits, micro-batch and workers may change; a finished run returns its own result."""
    first = runs.run(tmp_path, *MLP)
    assert launch.launch(runs.configure(tmp_path, *MLP)) == first.objective
    free = ("train.max_steps=3", "every.save=2", "memory.limit=1GiB", "batch.micro_size=4", "data.num_workers=1")
    assert refusal(tmp_path, *MLP, *free) is None
    longer = launch.launch(runs.configure(tmp_path, *MLP, "train.max_steps=3"))
    assert longer != first.objective
    assert helpers.result(tmp_path)["steps"] == 3


@pytest.mark.parametrize("mode", ["eval", "export"])
def test_what_trains_nothing_is_not_asked(tmp_path, mode):
    runs.run(tmp_path, *MLP)
    named = f"checkpointing.resume={tmp_path}"
    assert refusal(tmp_path, *MLP, "train.seed=3", named, f"mode={mode}") is None
    assert refusal(tmp_path, *MLP, "train.seed=3", named) is not None


def test_a_run_that_left_nothing_is_replaced(tmp_path):
    """Neither checkpoint nor result: the settings of the next run count."""
    runs.prepare(tmp_path, *MLP).close()
    assert (tmp_path / experiment.RECORD).exists()
    assert refusal(tmp_path, *MLP, "train.seed=3") is None
    runs.run(tmp_path, *MLP, "train.seed=3")
    assert "train.seed: 3 before, 0 now" in refusal(tmp_path, *MLP)
    assert refusal(tmp_path, *MLP, "train.seed=3") is None


def test_a_directory_of_an_older_version(tmp_path, caplog):
    """Its newest checkpoint has the settings; a result alone says nothing of them."""
    runs.run(tmp_path, *MLP)
    (tmp_path / experiment.RECORD).unlink()
    assert "optimizer.lr: 0.01 before" in refusal(tmp_path, *MLP, "optimizer.lr=0.5")
    assert refusal(tmp_path, *MLP) is None
    shutil.rmtree(tmp_path / "checkpoints")
    assert refusal(tmp_path, *MLP, "optimizer.lr=0.5") is None
    assert "has no record of its run's settings" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"settings": 3}', b'{"settings": {"train": 3}}', b"\xff"])
def test_a_damaged_record_is_none(tmp_path, content):
    runs.run(tmp_path, *MLP)
    (tmp_path / experiment.RECORD).write_bytes(content)
    assert "train.seed: 0 before, 3 now" in refusal(tmp_path, *MLP, "train.seed=3")  # by its checkpoint


def test_the_record_is_of_the_settings_that_the_run_began_with(tmp_path):
    """Not of what the checkpoint that it continues has changed, nor of a later start."""
    runs.run(tmp_path / "a", *MLP)
    onward = (*MLP, "train.max_steps=4", "train.seed=5", f"checkpointing.resume={tmp_path / 'a'}")
    runs.run(tmp_path / "b", *onward)
    assert json.loads((tmp_path / "b" / experiment.RECORD).read_text())["settings"]["train"]["seed"] == 5
    assert refusal(tmp_path / "b", *onward) is None
    again = [text for text in onward if "resume" not in text]  # as the command that continues it
    runs.run(tmp_path / "b", *again, "train.max_steps=5")
    assert refusal(tmp_path / "b", *onward) is None
    assert "train.seed: 5 before, 0 now" in refusal(tmp_path / "b", *again, "train.seed=0")


def test_an_argument_that_is_only_spelt_out(tmp_path):
    """AdamW's `amsgrad` is false; the YAML file does not list it."""
    runs.run(tmp_path, *MLP)
    assert refusal(tmp_path, *MLP, "+optimizer.amsgrad=false") is None
    assert "optimizer.amsgrad: false before, true now" in refusal(tmp_path, *MLP, "+optimizer.amsgrad=true")


def test_the_command_line_refuses_before_anything_is_written(tmp_path):
    runs.run(tmp_path / "run", *MLP)
    before = contents(tmp_path / "run")
    done = helpers.run_cli(*runs.TINY, *MLP, "optimizer.lr=0.5", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer.lr: 0.01 before, 0.5 now" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_a_job_of_a_sweep_is_refused_alone(tmp_path):
    """Hydra's sweeper goes on with the others, and an optimizing one counts it as failed."""
    first = runs.run(tmp_path / "sweep" / "0", *MLP)
    done = helpers.run_cli(
        "-m", *runs.TINY, *MLP, "optimizer.lr=0.5,0.01", "hydra.sweep.dir=sweep", cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "optimizer.lr: 0.01 before, 0.5 now" in done.stderr
    assert helpers.result(tmp_path / "sweep" / "0")["objective"] == first.objective
    assert helpers.result(tmp_path / "sweep" / "1")["objective"] == first.objective


@pytest.mark.slow
def test_several_ranks_are_refused_together(tmp_path):
    """Those that torchrun has started ask rank 0; none waits for another."""
    runs.run(tmp_path / "run", *MLP)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trainapp"]
    settings = [*runs.TINY, *MLP, "parallel=ddp", "train.seed=3", "hydra.run.dir=run"]
    done = subprocess.run(
        [*command, *settings], cwd=tmp_path, env=helpers.environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "train.seed: 0 before, 3 now" in done.stderr
    assert helpers.result(tmp_path / "run")["steps"] == 2
    assert not (tmp_path / "run" / "run.lock").exists()
