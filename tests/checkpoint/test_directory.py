"""Checkpoints on disk: kept, removed, found, skipped when damaged; and a kill at any moment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import runs
import torch
from states import MANIFEST, METADATA, SHARD, VALUES, damage_file, directory, names, save, value

from trainapp.checkpoint.directory import resolve
from trainapp.checkpoint.manifest import FORMAT
from trainapp.errors import TrainingStopped, UserError

MLP = runs.MODELS["mlp"]


def own_messages(caplog):
    """This project's warnings only: torch logs the paths of its checkpoints, which contain the test's name."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("trainapp") and r.levelname == "WARNING"]


def test_the_last_and_the_best_are_kept(tmp_path):
    """The best by the objective, and as many of the newest as configured."""
    found = []
    for step, is_best in ((1, True), (2, False), (3, True), (4, False), (5, False), (6, False)):
        save(tmp_path, step, is_best, keep_last=2)
        found.append([int(name[-1]) for name in names(tmp_path) if name.startswith("step_")])
    assert found == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6]]
    assert directory(tmp_path).best().name == "step_00000003"
    assert directory(tmp_path).newest().name == "step_00000006"
    assert names(tmp_path)[:2] == ["best", "latest"]
    assert bool((value(directory(tmp_path).newest()) == 6).all())


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
    assert best not in (1, 8)  # otherwise this proves nothing
    assert directory(tmp_path).best().name == f"step_{best:08d}"
    assert {name for name in names(tmp_path) if name.startswith("step_")} == {f"step_{best:08d}", "step_00000008"}


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "missing"])
@pytest.mark.parametrize("file", [SHARD, METADATA, VALUES, MANIFEST])
def test_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path, caplog, file, how):
    if (file, how) == (MANIFEST, "flipped"):
        pytest.skip("a flipped bit in the manifest may hit a blank or the copy of the configuration")
    runs.run_until(tmp_path, 4, *MLP, "every.save=2", "train.max_steps=6")
    damage_file(runs.checkpoint(tmp_path, 4) / file, how)
    run = runs.prepare(tmp_path, *MLP)
    run.tracker.close()
    assert run.state.progress.step == 2
    warnings = [text for text in own_messages(caplog) if "damaged" in text]
    assert len(warnings) == 1
    assert str(runs.checkpoint(tmp_path, 4)) in warnings[0]
    with pytest.raises(UserError, match=r"damaged.*checkpointing\.resume=.*step_00000002|neither a checkpoint|damaged"):
        resolve(str(runs.checkpoint(tmp_path, 4)))


def test_after_a_damaged_one_the_run_ends_as_it_would_have(tmp_path):
    runs.run(tmp_path / "a", *MLP, "train.max_steps=6")
    runs.run_until(tmp_path / "b", 4, *MLP, "train.max_steps=6", "every.save=2")
    damage_file(runs.checkpoint(tmp_path / "b", 4) / SHARD, "flipped")
    runs.run(tmp_path / "b", *MLP, "train.max_steps=6")
    for part in ("model", "optimizer", "rng", "progress"):
        assert runs.differences(runs.saved(tmp_path / "b", 6)[part], runs.saved(tmp_path / "a", 6)[part]) == []
    assert [line["step"] for line in helpers.metrics(tmp_path / "b")] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path):
    """The checkpoint with the highest step may be the one that cannot be read."""
    runs.run_until(tmp_path, 8, *MLP, "train.max_steps=20", "every.save=4", "checkpointing.keep_last=2")
    damage_file(runs.checkpoint(tmp_path, 8) / SHARD, "flipped")
    runs.run_until(tmp_path, 5, *MLP, "train.max_steps=20", "checkpointing.keep_last=1")
    run = runs.prepare(tmp_path, *MLP, "train.max_steps=20")
    run.tracker.close()
    assert run.state.progress.step == 5


def test_all_damaged_starts_anew(tmp_path, caplog):
    runs.run_until(tmp_path, 2, *MLP)
    damage_file(runs.checkpoint(tmp_path, 2) / SHARD, "truncated")
    run = runs.prepare(tmp_path, *MLP)
    run.tracker.close()
    assert run.state.progress.step == 0
    assert [text for text in own_messages(caplog) if "damaged" in text]


def test_another_format_is_refused_by_name_and_passed_over(tmp_path, caplog):
    """A checkpoint of an older version: intact, but in files that this version does not read."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    old = runs.checkpoint(tmp_path, 2)
    torch.save({"model": {}}, old / "state.pt")
    manifest = json.loads((old / MANIFEST).read_text())
    (old / MANIFEST).write_text(json.dumps({**manifest, "format": FORMAT - 1}))
    message = f"has format {FORMAT - 1}, this version reads format {FORMAT}"
    with pytest.raises(UserError, match=f"this checkpoint {message}; the one before it is good: .*step_00000001"):
        resolve(str(old))
    assert directory(tmp_path).newest() == runs.checkpoint(tmp_path, 1)
    assert own_messages(caplog) == [f"checkpoint {old} {message}; using the one before it"]


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from states import directory, save, value
from trainapp.checkpoint.manifest import damage
torch.set_num_threads(1)
folder, tries, highest = Path(sys.argv[1]), int(sys.argv[2]), 0
leftovers = 0
for number in range(tries):
    child = os.fork()
    if not child:
        step = highest
        while True:
            step += 1
            save(folder, step, is_best=step % 3 == 1, floats=300_000)
    while not (folder / "checkpoints" / f"step_{highest + 2:08d}").exists():
        time.sleep(0.001)
    time.sleep(0.013 * number)  # a save takes some 10 ms: all phases of it are struck
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    leftovers += bool(list((folder / "checkpoints").glob(".tmp-*")))
    found = directory(folder)
    problems = [damage(path) for path in found._newest_first()]
    newest = found.newest()
    step = int(newest.name[-8:])
    assert not any(problems), problems
    assert bool((value(newest) == step).all()), (value(newest), step)
    assert step > highest, (step, highest)
    assert found.best() is not None and damage(found.best()) is None
    highest = step
print(leftovers, highest)
"""


def test_killed_while_saving_leaves_a_good_one(tmp_path):
    """kill -9 at twelve moments; every checkpoint under its final name is complete, and the newest step advances."""
    path = [Path(__file__).parent, Path(__file__).parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "12"],
        capture_output=True,
        text=True,
        env=helpers.environment({"PYTHONPATH": os.pathsep.join(map(str, path))}),
    )
    assert done.returncode == 0, done.stderr
    leftovers, highest = map(int, done.stdout.split())
    assert leftovers >= 4  # most of the kills struck in the middle of a save
    assert highest >= 24
    save(tmp_path, highest + 1)
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


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(
        TrainingStopped, match=r"the checkpoint of step 3 could not be written.*the last good one is none"
    ):
        save(tmp_path, 3)


def test_resolve(tmp_path):
    runs.run_until(tmp_path / "run", 4, *MLP, "every.save=2", "train.max_steps=6")
    newest, older = runs.checkpoint(tmp_path / "run", 4), runs.checkpoint(tmp_path / "run", 2)
    assert resolve(str(tmp_path / "run")) == newest
    assert resolve(str(tmp_path / "run" / "checkpoints")) == newest
    assert resolve(str(older)) == older
    assert resolve(str(older / VALUES)) == older
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a checkpoint nor a run directory"):
        resolve(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no such file or directory"):
        resolve(str(tmp_path / "nowhere"))
    damage_file(newest / SHARD, "flipped")
    with pytest.raises(UserError, match=f"damaged .*the one before it is good: checkpointing.resume={older}"):
        resolve(str(newest))
