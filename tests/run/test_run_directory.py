"""A run's directory: one run at a time, freed by the death of its process, and one experiment."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys

import helpers
import psutil
import pytest
import runs
from helpers import environment, files, run_cli

from trainapp.errors import UserError
from trainapp.run import directory


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    """The launcher sets what torch reads at its start."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    yield
    for path in list(directory._held):
        directory.release(path.parent)


def test_released_it_leaves_nothing(tmp_path):
    directory.acquire(tmp_path / "run")
    directory.acquire(tmp_path / "run")  # no effect
    directory.release(tmp_path / "run")
    directory.release(tmp_path / "run")
    assert files(tmp_path) == set()


def test_a_file_system_without_locks_is_named_and_one_that_refuses_ends_the_run(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", fails)
    number = errno.ENOSYS
    directory.acquire(tmp_path)
    assert "its file system has no locks" in caplog.text
    number = errno.EROFS
    with pytest.raises(UserError, match=r"run\.lock: Read-only.*must name a folder you can write to"):
        directory.acquire(tmp_path)


MLP = (*runs.MODELS["mlp"], "train.max_steps=2", "every.eval=1", "objective=min loss", "optimizer.lr=0.01")


def contents(folder):
    """Every file with its bytes and its time."""
    return {name: ((folder / name).read_bytes(), (folder / name).stat().st_mtime_ns) for name in files(folder)}


def refusal(folder, *overrides):
    """The message where the launcher refuses these settings, None where it would train."""
    try:
        directory.require_same_experiment(runs.configure(folder, *overrides))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("setting", ["init_from: null", "init_prefix: null", "freeze_mode: null", "freeze: []"])
def test_an_empty_setting_beside_a_users_model_is_none(tmp_path, setting):
    """Until the class is known, it may be an argument: the same command continues the run."""
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\nmodel: {{_target_: own_models.FrozenNorm, {setting}}}\n"
    (tmp_path / "experiment/port.yaml").write_text(text)
    own = (f"hydra.searchpath=[file://{tmp_path}]", "experiment=port", "data=digits", "user_packages=[own_models]")
    runs.run(tmp_path / "run", *own, "train.max_steps=1")
    assert refusal(tmp_path / "run", *own, "train.max_steps=2") is None
    assert "model.freeze: not set before" in refusal(tmp_path / "run", *own, "model.freeze=[body]")


def test_an_overridden_setting_beside_a_users_model_is_none(tmp_path):
    """A null on the command line replaces the value in the file."""
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nmodel: {_target_: own_models.FrozenNorm, init_from: x.pt}\n"
    (tmp_path / "experiment/port.yaml").write_text(text)
    own = (f"hydra.searchpath=[file://{tmp_path}]", "experiment=port", "data=digits", "user_packages=[own_models]")
    runs.run(tmp_path / "run", *own, "model.init_from=null", "train.max_steps=1")
    assert refusal(tmp_path / "run", *own, "model.init_from=null", "train.max_steps=2") is None
    assert "model.init_from" in refusal(tmp_path / "run", *own)


def test_another_experiment_is_refused(tmp_path):
    """Else the old result would be returned as that of the new settings."""
    first = runs.run(tmp_path, *MLP)
    message = refusal(tmp_path, *MLP, "optimizer.lr=0.5", "train.seed=3", "every.log=2")
    assert message.splitlines()[:3] == [
        f"hydra.run.dir={tmp_path}: this directory belongs to a run whose settings give another result:",
        "  optimizer.lr: 0.01 before, 0.5 now",
        "  train.seed: 0 before, 3 now",
    ]
    named = f"checkpointing.resume={tmp_path}"
    assert named in message
    assert refusal(tmp_path, *MLP, "train.seed=3", named, "mode=eval") is None  # it writes nothing of a run
    assert runs.run(tmp_path, *MLP, "optimizer.lr=0.5").objective == first.objective  # unless it is asked


def test_a_damaged_manifest_is_not_compared(tmp_path):
    """The one before it is, from which the run then continues."""
    runs.run(tmp_path, *MLP, "every.save=1", "checkpointing.keep_last=2")
    manifest = runs.checkpoint(tmp_path, 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"lr": 0.01', '"lr": 0.02'))
    assert refusal(tmp_path, *MLP) is None
    assert "optimizer.lr: 0.01 before, 0.02 now" in refusal(tmp_path, *MLP, "optimizer.lr=0.02")


def test_the_same_experiment_continues(tmp_path, caplog, capsys):
    """Its end, cadences and limits may change, and are named; a finished run returns its own result."""
    caplog.set_level("INFO", "trainapp")
    first = runs.run(tmp_path, *MLP)
    before = helpers.metrics(tmp_path), helpers.evaluations(tmp_path)
    assert runs.run(tmp_path, *MLP).objective == first.objective
    assert (helpers.metrics(tmp_path), helpers.evaluations(tmp_path)) == before
    assert helpers.result(tmp_path)["samples_per_second"] > 0  # the measurements of then
    assert "  train.max_steps=2\n" in capsys.readouterr().out
    assert "other settings than in the checkpoint" not in caplog.text
    onward = (*MLP, "train.max_steps=3", "every.save=2")
    assert runs.run(tmp_path, *onward).objective != first.objective
    assert "other settings than in the checkpoint: every.save not set -> 2, train.max_steps 2 -> 3" in caplog.text
    assert helpers.result(tmp_path)["steps"] == 3


def test_a_branch_into_another_directory_keeps_the_seed(tmp_path):
    runs.run(tmp_path / "a", *MLP, "train.seed=5")
    onward = (*MLP, "train.max_steps=4", "optimizer.lr=0.5", f"checkpointing.resume={tmp_path / 'a'}")
    runs.run(tmp_path / "b", *onward)
    assert refusal(tmp_path / "b", *onward) is None
    assert runs.saved(tmp_path / "b", 4)["sampler"]["seed"] == 5
    with pytest.raises(UserError, match=r"train\.seed=6: the run in .*step_00000002 has seed 5"):
        runs.run(tmp_path / "c", *onward, "train.seed=6")


def test_the_command_line_refuses_before_anything_is_written(tmp_path):
    runs.run(tmp_path / "run", *MLP)
    before = contents(tmp_path / "run")
    done = run_cli(*runs.TINY, *MLP, "optimizer.lr=0.5", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer.lr: 0.01 before, 0.5 now" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(tmp_path / "run") == before


@pytest.mark.nightly
def test_several_ranks_are_refused_together(tmp_path):
    """Those that torchrun has started ask rank 0; none waits for another."""
    runs.run(tmp_path / "run", *MLP)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trainapp"]
    settings = [*runs.TINY, *MLP, "parallel=ddp", "train.seed=3", "hydra.run.dir=run"]
    done = subprocess.run(
        [*command, *settings], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "train.seed: 0 before, 3 now" in done.stderr
    assert helpers.result(tmp_path / "run")["steps"] == 2
    assert not (tmp_path / "run" / directory.LOCK).exists()


@pytest.mark.slow
def test_a_run_in_progress_is_neither_joined_nor_evaluated_in_its_directory(tmp_path, monkeypatch):
    """Refused with one message, before anything is written; from another directory it is read. Its death frees the
    directory, although its loader's worker lives on for a while.
    """
    folder, tiny = tmp_path / "run", (*runs.TINY, "model=mlp", "model.width=4")
    endless = (*tiny, "train.max_steps=100000", "every.save=20", "checkpointing.keep_last=100000")
    command = [sys.executable, "-m", "trainapp", *endless, "data.num_workers=1", f"hydra.run.dir={folder}"]
    with open(tmp_path / "output.txt", "w") as output:
        run = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=output, stderr=output)
    try:
        helpers.wait_until(lambda: list((folder / "checkpoints").glob("step_*")), run)
        before, lock = contents(folder / ".hydra"), (folder / directory.LOCK).read_text()
        assert lock.startswith(f" (process {run.pid} on host {socket.gethostname()}, since 20")
        named = f"checkpointing.resume={folder}"
        for overrides in (("train.seed=7",), (named, "mode=eval")):
            second = run_cli(*endless, *overrides, f"hydra.run.dir={folder}", cwd=tmp_path)
            assert second.returncode == 2, second.stderr
            assert f"hydra.run.dir={folder}: another run is using this directory{lock}" in second.stderr
            assert "Traceback" not in second.stderr
            assert (contents(folder / ".hydra"), (folder / directory.LOCK).read_text()) == (before, lock)
        reading = run_cli(*tiny, named, "mode=eval", f"hydra.run.dir={tmp_path / 'other'}", cwd=tmp_path)
        assert reading.returncode == 0, reading.stderr
        with monkeypatch.context() as without_locks:  # negative control
            without_locks.setattr(fcntl, "lockf", lambda *_: None)
            directory.acquire(folder)
            os.close(directory._held.popitem()[1])  # `release` would also remove the run's file
        workers = psutil.Process(run.pid).children()
        assert workers
        for worker in workers:
            worker.suspend()
    finally:
        run.kill()
        run.wait()
    last = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    again = run_cli(*endless, f"train.max_steps={last + 1}", f"hydra.run.dir={folder}", cwd=tmp_path)
    for worker in workers:
        worker.kill()
    assert again.returncode == 0, again.stderr
    assert re.search(rf"resumed from \S+step_{last:08d}", (folder / "trainapp.log").read_text())
