"""What a checkpoint holds, saving synchronously and in the background, and full disks."""

import hashlib
import json
import resource
import subprocess
import sys
import threading

import helpers
import pytest
import runs
import torch
from states import METADATA, SHARD, VALUES, OneTensor, directory, names

from trainapp.checkpoint.checkpointer import Checkpointer
from trainapp.checkpoint.directory import damage
from trainapp.errors import UserError
from trainapp.parallel.ranks import SingleRank
from trainapp.training import loop

MLP = runs.MODELS["mlp"]
LATER = "checkpointing.asynchronous=true"


def test_what_is_in_one(tmp_path):
    runs.run(tmp_path, *MLP)
    folder = runs.checkpoint(tmp_path, 4)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"].keys() == {SHARD, METADATA, VALUES} == helpers.files(folder) - {"manifest.json"}
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["step"] == 4
    assert manifest["ranks"] == 1
    assert manifest["config"]["model"]["arguments"]["width"] == 16
    assert manifest["versions"]["torch"] == torch.__version__
    state = runs.saved(tmp_path, 4)
    assert {"model", "optimizer", "scaler", "progress", "sampler", "sizes", "average"} <= state.keys()
    assert state["sampler"] == {"seed": 0, "epoch": 0, "consumed": 64, "samples": 1437, "order": "permutation"}
    assert state["sizes"]["micro"]["start"] == 16
    assert damage(folder) is None


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    run = runs.run_until(tmp_path, 2, *runs.MODELS["gpt"])
    own = run.state.model.state_dict(keep_vars=True)
    saved = runs.saved(tmp_path, 2)["model"]
    (tied,) = own.keys() - saved.keys()
    (first,) = [name for name in saved if own[name] is own[tied]]
    assert torch.equal(saved[first], own[tied])
    again = runs.closed(tmp_path, *runs.MODELS["gpt"])
    restored = again.state.model.state_dict(keep_vars=True)
    assert restored[first] is restored[tied]
    assert runs.differences(again.state.model.state_dict(), run.state.model.state_dict()) == []


def test_torchs_own_converter_makes_weights_to_start_from(tmp_path):
    """The layout is torch's: its tool converts it to one file whose `model` is a state dict."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run = runs.run_until(tmp_path / "run", 2, *MLP)
    dcp_to_torch_save(runs.checkpoint(tmp_path / "run", 2), tmp_path / "weights.pt")
    again = runs.closed(tmp_path / "again", *MLP, "train.seed=1", f"model.init_from={tmp_path / 'weights.pt'}")
    assert runs.differences(again.state.model.state_dict(), run.state.model.state_dict()) == []


@pytest.mark.parametrize("inside", [SHARD, VALUES])
def test_a_file_of_a_checkpoint_is_no_file_of_weights(tmp_path, inside):
    """The message says what to name."""
    runs.run_until(tmp_path / "run", 1, *MLP)
    path = runs.checkpoint(tmp_path / "run", 1)
    with pytest.raises(UserError, match="give the checkpoint's folder"):
        runs.prepare(tmp_path / "again", *MLP, f"model.init_from={path / inside}")


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


@pytest.mark.slow
@pytest.mark.parametrize("when", [(), (LATER,)])
def test_a_disk_that_refuses(tmp_path, when):
    """The system's limit on file size strikes in a run's second save: one message, and the first one stays intact."""
    overrides = ("model=mlp", "train.max_epochs=null", "train.device=cpu", "every.eval=null")
    runs.run(tmp_path / "run", *overrides, "batch.global_size=64", "train.max_steps=2")
    done = subprocess.run(
        [sys.executable, "-m", "trainapp", *overrides, "train.max_steps=4", *when, f"hydra.run.dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=helpers.environment(),
        preexec_fn=limit_files,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the checkpoint of step 4 could not be written to" in done.stderr
    assert f"the last good one is {runs.checkpoint(tmp_path / 'run', 2)}" in done.stderr
    assert damage(runs.checkpoint(tmp_path / "run", 2)) is None
    assert not [name for name in names(tmp_path / "run") if name.startswith(".tmp")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_that_is_not_the_disks_is_not_hidden(tmp_path, monkeypatch, asynchronous):
    def fails(*_):
        raise RuntimeError("a mistake in the model")

    monkeypatch.setattr(torch, "save", fails)
    checkpointer = Checkpointer(OneTensor(1), directory(tmp_path), SingleRank(), asynchronous)
    if asynchronous:
        checkpointer.save(1, {}, {}, False)
    with pytest.raises(RuntimeError, match="a mistake in the model"):
        checkpointer.finish() if asynchronous else checkpointer.save(1, {}, {}, False)


@pytest.mark.slow
def test_in_the_background_the_same_is_saved(tmp_path):
    """The state at the time of `save`, not that of a later step, which changes the same tensors in place."""
    overrides = (*runs.MODELS["gpt"], "train.ema=0.9", "every.save=1", "checkpointing.keep_last=4")
    runs.run(tmp_path / "now", *overrides)
    runs.run(tmp_path / "later", *overrides, LATER)
    assert names(tmp_path / "now") == names(tmp_path / "later")
    for step in (1, 2, 3, 4):
        assert runs.differences(runs.saved(tmp_path / "now", step), runs.saved(tmp_path / "later", step)) == []
        assert damage(runs.checkpoint(tmp_path / "later", step)) is None


def test_training_goes_on_while_it_is_written(tmp_path, monkeypatch):
    written, may_write = [], threading.Event()
    write = torch.save

    def slow(values, path):
        assert may_write.wait(30)
        write(values, path)
        written.append(path)

    monkeypatch.setattr(torch, "save", slow)
    run = runs.prepare(tmp_path, *MLP, LATER, "every.save=1")
    loop.train_step(run)
    loop.save(run)
    assert run.checkpointer.saved_at == 1
    for _ in range(3):
        loop.train_step(run)
    assert run.state.progress.step == 4
    assert written == []
    assert run.checkpointer.busy
    assert directory(tmp_path).newest() is None
    assert names(tmp_path) == [".tmp-step_00000001"]
    may_write.set()
    run.checkpointer.finish()
    run.tracker.close()
    assert not run.checkpointer.busy
    assert directory(tmp_path).newest().name == "step_00000001"


def test_save_false_writes_nothing_and_passes_over_what_was_saved_before(tmp_path):
    """It resumes from a checkpoint, but neither reports it nor saves one."""
    assert runs.run(tmp_path / "new", *MLP, "checkpointing.save=false", "every.save=1").checkpoint is None
    assert not (tmp_path / "new" / "checkpoints").exists()
    runs.run_until(tmp_path, 2, *MLP)
    run = runs.closed(tmp_path, *MLP, "checkpointing.save=false")
    assert (run.state.progress.step, run.checkpointer.saved_at) == (2, 2)
    assert (run.checkpointer.newest_name(), run.checkpointer.busy) == (None, False)
    run.checkpointer.save(3, {}, {}, False)
    run.checkpointer.finish()
    assert run.checkpointer.saved_at == 3
    assert [name for name in names(tmp_path) if name.startswith("step_")] == ["step_00000002"]


def test_a_named_checkpoint_is_read_where_none_is_saved(tmp_path):
    runs.run_until(tmp_path / "run", 2, *MLP)
    resume = f"checkpointing.resume={tmp_path / 'run'}"
    result = runs.run(tmp_path / "out", *MLP, "mode=eval", resume, "checkpointing=off", "every.eval=2")
    assert result.steps == 2
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_the_thread_in_the_background_uses_the_runs_device(tmp_path, monkeypatch):
    """A new thread's current device is GPU 0, where torch's writer would open a context of every rank."""
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((device, threading.current_thread())))
    state = OneTensor(1)
    state.device = torch.device("cuda", 3)
    checkpointer = Checkpointer(state, directory(tmp_path), SingleRank(), asynchronous=True)
    checkpointer.save(1, {}, {}, False)
    checkpointer.finish()
    ((device, thread),) = devices
    assert device == state.device
    assert thread is not threading.current_thread()
