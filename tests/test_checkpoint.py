import hashlib
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import zipfile

import helpers
import pytest
import runs
import torch

from trainapp.checkpoint.checkpoints import Checkpoints, damage, resolve
from trainapp.errors import TrainingStopped, UserError
from trainapp.train import loop

MLP = runs.MODELS["mlp"]


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def tensor_of(value, floats=1000):
    """What `Checkpoints.save` calls to write a checkpoint that can be told by a number."""
    return lambda folder: torch.save({"value": torch.full((floats,), float(value))}, folder / "state.pt")


def damage_file(path, how):
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "empty":
        os.truncate(path, 0)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_what_is_in_one(tmp_path):
    runs.run(tmp_path, *MLP)
    folder = runs.checkpoint(tmp_path, 4)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000004\n"
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / "state.pt").read_bytes()
    assert manifest["files"]["state.pt"] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["step"] == 4
    assert manifest["config"]["model"]["arguments"]["width"] == 16
    assert manifest["versions"]["torch"] == torch.__version__
    state = runs.saved(tmp_path, 4)
    assert {"model", "optimizer", "scaler", "rng", "progress", "sampler", "sizes", "average"} <= state.keys()
    assert state["sampler"] == {"seed": 0, "epoch": 0, "consumed": 64}
    assert state["sizes"]["micro"]["start"] == 16
    assert damage(folder) is None


def test_the_last_and_the_best_are_kept(tmp_path):
    """The best by the objective, and as many of the newest as asked."""
    found = []
    for step, is_best in ((1, True), (2, False), (3, True), (4, False), (5, False), (6, False)):
        checkpoints = Checkpoints(tmp_path, keep_last=2)
        checkpoints.save(tensor_of(step), step, {}, is_best)
        found.append([int(name[-1]) for name in names(tmp_path) if name.startswith("step_")])
    assert found == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6]]
    assert checkpoints.best().name == "step_00000003"
    assert checkpoints.newest().name == "step_00000006"
    assert names(tmp_path)[:2] == ["best", "latest"]


def test_the_best_of_a_run(tmp_path):
    """By the evaluation of the same step."""
    runs.run(
        tmp_path,
        *MLP,
        "train.max_steps=8",
        "every.eval=1",
        "every.save=1",
        "checkpointing.keep_last=1",
        "optimizer.lr=0.3",
    )
    accuracies = {line["step"]: line["accuracy"] for line in helpers.evaluations(tmp_path)}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert best not in (1, 8)  # else this proves nothing
    assert Checkpoints(tmp_path, 1).best().name == f"step_{best:08d}"
    assert {name for name in names(tmp_path) if name.startswith("step_")} == {f"step_{best:08d}", "step_00000008"}


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "missing"])
@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path, caplog, file, how):
    runs.run_until(tmp_path, 4, *MLP, "every.save=2", "train.max_steps=6")
    damage_file(runs.checkpoint(tmp_path, 4) / file, how)
    if (file, how) == ("manifest.json", "flipped"):
        pytest.skip("a flipped bit in the manifest may hit a blank or the copy of the configuration")
    run = runs.prepare(tmp_path, *MLP)
    run.tracker.close()
    assert run.state.progress.step == 2
    warnings = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(warnings) == 1
    assert str(runs.checkpoint(tmp_path, 4)) in warnings[0]
    with pytest.raises(UserError, match=r"damaged.*checkpointing\.resume=.*step_00000002|neither a checkpoint|damaged"):
        resolve(str(runs.checkpoint(tmp_path, 4)))


def test_after_a_damaged_one_the_run_ends_as_it_would_have(tmp_path):
    runs.run(tmp_path / "a", *MLP, "train.max_steps=6")
    runs.run_until(tmp_path / "b", 4, *MLP, "train.max_steps=6", "every.save=2")
    damage_file(runs.checkpoint(tmp_path / "b", 4) / "state.pt", "flipped")
    runs.run(tmp_path / "b", *MLP, "train.max_steps=6")
    for part in ("model", "optimizer", "rng", "progress"):
        assert runs.differences(runs.saved(tmp_path / "b", 6)[part], runs.saved(tmp_path / "a", 6)[part]) == []
    assert [line["step"] for line in helpers.metrics(tmp_path / "b")] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path):
    """The newest by its number may be the one that cannot be read."""
    runs.run_until(tmp_path, 8, *MLP, "train.max_steps=20", "every.save=4", "checkpointing.keep_last=2")
    damage_file(runs.checkpoint(tmp_path, 8) / "state.pt", "flipped")
    runs.run_until(tmp_path, 5, *MLP, "train.max_steps=20", "checkpointing.keep_last=1")
    run = runs.prepare(tmp_path, *MLP, "train.max_steps=20")
    run.tracker.close()
    assert run.state.progress.step == 5


def test_all_damaged_starts_anew(tmp_path, caplog):
    runs.run_until(tmp_path, 2, *MLP)
    damage_file(runs.checkpoint(tmp_path, 2) / "state.pt", "truncated")
    run = runs.prepare(tmp_path, *MLP)
    run.tracker.close()
    assert run.state.progress.step == 0
    assert "damaged" in caplog.text


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from trainapp.checkpoint.checkpoints import Checkpoints, damage
torch.set_num_threads(1)
folder, tries, highest = Path(sys.argv[1]), int(sys.argv[2]), 0
leftovers = 0
for number in range(tries):
    child = os.fork()
    if not child:
        step = highest
        while True:
            step += 1
            payload = torch.full((300_000,), float(step))
            write = lambda f: torch.save({"value": payload}, f / "state.pt")
            Checkpoints(folder, 2).save(write, step, {}, step % 3 == 1)
    while not (folder / "checkpoints" / f"step_{highest + 2:08d}").exists():
        time.sleep(0.001)
    time.sleep(0.013 * number)  # a save takes some 10 ms: all phases of it are struck
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    leftovers += bool(list((folder / "checkpoints").glob(".tmp-*")))
    found = Checkpoints(folder, 2)
    problems = [damage(path) for path in found._all()]
    newest = found.newest()
    value = torch.load(newest / "state.pt", weights_only=True)["value"]
    step = int(newest.name[-8:])
    assert not any(problems), problems
    assert bool((value == step).all()), (value, step)
    assert step > highest, (step, highest)
    assert found.best() is not None and damage(found.best()) is None
    highest = step
print(leftovers, highest)
"""


def test_killed_while_saving_leaves_a_good_one(tmp_path):
    """kill -9 at twelve moments; every checkpoint that has its name is whole, and the newest goes forward."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "12"], capture_output=True, text=True, env=helpers.environment()
    )
    assert done.returncode == 0, done.stderr
    leftovers, highest = map(int, done.stdout.split())
    assert leftovers >= 4  # most of them struck in the middle of a save
    assert highest >= 24
    Checkpoints(tmp_path, 2).save(tensor_of(0), highest + 1, {}, False)
    assert not [name for name in names(tmp_path) if name.startswith(".tmp")]


PLAIN_SAVE = """
import os, signal, sys, time, torch
torch.set_num_threads(1)
bad = 0
for number in range(12):
    child = os.fork()
    if not child:
        while True:
            torch.save({"value": torch.full((300_000,), 1.0)}, sys.argv[1])
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.001)
    time.sleep(0.05 + 0.013 * number)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        torch.load(sys.argv[1], weights_only=True)
    except Exception:
        bad += 1
print(bad)
"""


def test_a_plain_save_does_not(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_SAVE, str(tmp_path / "x.pt")],
        capture_output=True,
        text=True,
        env=helpers.environment(),
    )
    assert int(done.stdout) >= 2, done.stderr


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def plant(path, marker):
    """Put a pickle that makes a directory into a checkpoint's state, under a manifest that vouches for it."""
    state = torch.load(path / "state.pt", weights_only=True)
    torch.save({**state, "extra": Payload(marker)}, path / "state.pt")
    content = (path / "state.pt").read_bytes()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("setting", ["auto", "path", "eval"])
def test_a_planted_payload_does_not_run(tmp_path, setting):
    run_dir, marker = tmp_path / "run", tmp_path / "payload-ran"
    runs.run_until(run_dir, 2, *MLP)
    path = runs.checkpoint(run_dir, 2)
    plant(path, marker)
    assert damage(path) is None
    extra = {
        "auto": (),
        "path": (f"checkpointing.resume={path}",),
        "eval": (f"checkpointing.resume={run_dir}", "mode=eval"),
    }[setting]
    with pytest.raises(UserError, match="more than tensors and plain values") as caught:
        runs.run(run_dir if setting == "auto" else tmp_path / "other", *MLP, *extra)
    assert str(path) in str(caught.value)
    assert not marker.exists()
    torch.load(path / "state.pt", weights_only=False)  # the payload is a live one
    assert marker.exists()


@pytest.mark.parametrize("kind", ["plain pickle", "legacy", "not a checkpoint", "zip of something else"])
def test_other_files_in_its_place(tmp_path, kind):
    """What passes for a checkpoint by its manifest, and is none."""
    runs.run_until(tmp_path, 1, *MLP)
    path, marker = runs.checkpoint(tmp_path, 1), tmp_path / "payload-ran"
    state = path / "state.pt"
    if kind == "plain pickle":
        state.write_bytes(pickle.dumps(Payload(marker)))
    elif kind == "legacy":
        torch.save({"extra": Payload(marker)}, state, _use_new_zipfile_serialization=False)
    elif kind == "not a checkpoint":
        state.write_bytes(b"hello " * 100)
    else:
        with zipfile.ZipFile(state, "w") as file:
            file.writestr("a/hello.txt", "hello")
    manifest = json.loads((path / "manifest.json").read_text())
    content = state.read_bytes()
    manifest["files"]["state.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="step_00000001"):
        runs.prepare(tmp_path, *MLP)
    assert not marker.exists()


def test_nothing_in_it_but_tensors_and_plain_values(tmp_path):
    """Whatever weights_only refuses would make a checkpoint that cannot be loaded."""

    def kinds(value):
        if isinstance(value, dict):
            return set().union(*map(kinds, value.keys()), *map(kinds, value.values()))
        if isinstance(value, (list, tuple)):
            return set().union(*map(kinds, value)) if value else set()
        return {type(value)}

    runs.run(tmp_path, *runs.MODELS["resnet"], "precision=fp16", "train.ema=0.9", "every.eval=2")
    assert kinds(runs.saved(tmp_path, 4)) <= {torch.Tensor, int, float, str, bool, type(None)}


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_a_disk_that_refuses(tmp_path):
    """The system's own limit on a file's size, in the second save of a run: one message, the first one intact."""
    overrides = ("model=mlp", "train.max_epochs=null", "train.device=cpu", "every.eval=null")
    runs.run(tmp_path / "run", *overrides, "batch.global_size=64", "train.max_steps=2")
    done = subprocess.run(
        [sys.executable, "-m", "trainapp", *overrides, "train.max_steps=4", f"hydra.run.dir={tmp_path / 'run'}"],
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


LATER = "checkpointing.asynchronous=true"


def test_in_the_background_the_same_is_saved(tmp_path):
    """The state of the moment of `save`, not that of a later step, which changes the same tensors in place."""
    overrides = (
        *runs.MODELS["gpt"],
        "train.ema=0.9",
        "every.save=1",
        "checkpointing.keep_last=4",
        "oom.remember=false",
    )
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
    for _ in range(3):
        loop.train_step(run)
    assert run.state.progress.step == 4
    assert written == []
    assert names(tmp_path) == [".tmp-step_00000001"]
    may_write.set()
    run.checkpointer.finish()
    run.tracker.close()
    assert run.checkpointer.newest().name == "step_00000001"


def test_a_disk_that_refuses_in_the_background(tmp_path):
    overrides = ("model=mlp", "train.max_epochs=null", "train.device=cpu", "every.eval=null", "train.max_steps=4")
    done = subprocess.run(
        [sys.executable, "-m", "trainapp", *overrides, LATER, f"hydra.run.dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=helpers.environment(),
        preexec_fn=limit_files,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the checkpoint of step 4 could not be written to" in done.stderr


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(
        TrainingStopped, match=r"the checkpoint of step 3 could not be written.*the last good one is none"
    ):
        Checkpoints(tmp_path, 2).save(tensor_of(1), 3, {}, False)


def test_an_error_that_is_not_the_disks_is_not_hidden(tmp_path):
    def fails(folder):
        raise RuntimeError("a mistake in the model")

    with pytest.raises(RuntimeError, match="a mistake in the model"):
        Checkpoints(tmp_path, 2).save(fails, 1, {}, False)


def test_resolve(tmp_path):
    runs.run_until(tmp_path / "run", 4, *MLP, "every.save=2", "train.max_steps=6")
    newest, older = runs.checkpoint(tmp_path / "run", 4), runs.checkpoint(tmp_path / "run", 2)
    assert resolve(str(tmp_path / "run")) == newest
    assert resolve(str(tmp_path / "run" / "checkpoints")) == newest
    assert resolve(str(older)) == older
    assert resolve(str(older / "state.pt")) == older
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a checkpoint nor a run directory"):
        resolve(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no such file or directory"):
        resolve(str(tmp_path / "nowhere"))
    damage_file(newest / "state.pt", "flipped")
    with pytest.raises(UserError, match=f"damaged .*the one before it is good: checkpointing.resume={older}"):
        resolve(str(newest))


def test_save_false_writes_nothing(tmp_path):
    result = runs.run(tmp_path, *MLP, "checkpointing.save=false", "every.save=1")
    assert not (tmp_path / "checkpoints").exists()
    assert result.checkpoint is None
