"""Checkpoints on disk: kept, removed, found, skipped when damaged; and a kill at any moment."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import runs
from states import MANIFEST, METADATA, SHARD, VALUES, damage_file, directory, names, save, value

from trainapp.checkpoint.directory import checkpoints_in, damage, resolve
from trainapp.checkpoint.manifest import FORMAT, read_manifest, write_manifest
from trainapp.errors import UserError

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
    assert names(tmp_path)[0] == "best"
    assert bool((value(directory(tmp_path).newest()) == 6).all())


@pytest.mark.parametrize("every", [1, 8])
def test_the_best_of_a_run(tmp_path, every):
    """By the evaluation of the same step, which is saved even between two that `every.save` asks for."""
    runs.run(
        tmp_path,
        *MLP,
        "train.max_steps=8",
        "every.eval=1",
        f"every.save={every}",
        "checkpointing.keep_last=1",
        "optimizer.lr=0.3",
    )
    accuracies = {line["step"]: line["accuracy"] for line in helpers.evaluations(tmp_path)}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert best not in (1, 8)  # otherwise this proves nothing
    assert directory(tmp_path).best().name == f"step_{best:08d}"
    assert {name for name in names(tmp_path) if name.startswith("step_")} == {f"step_{best:08d}", "step_00000008"}


def test_a_run_that_saves_only_its_end(tmp_path):
    """The best is not saved either: `every.save=null` is the user's word."""
    runs.run(tmp_path, *MLP, "train.max_steps=3", "every.eval=1", "every.save=null", "objective=max loss")
    assert [name for name in names(tmp_path) if name.startswith("step_")] == ["step_00000003"]


DAMAGE = [
    (SHARD, "flipped"),
    (SHARD, "truncated"),
    (SHARD, "missing"),
    (METADATA, "flipped"),
    (VALUES, "empty"),
    (MANIFEST, "truncated"),
    (MANIFEST, "another seed"),
    (MANIFEST, "another setting"),
]


@pytest.mark.parametrize(("file", "how"), DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path, caplog, file, how):
    runs.run_until(tmp_path, 4, *MLP, "every.save=2", "train.max_steps=6")
    damage_file(runs.checkpoint(tmp_path, 4) / file, how)
    run = runs.closed(tmp_path, *MLP)
    assert run.state.progress.step == 2
    (warning,) = [text for text in own_messages(caplog) if "damaged" in text]
    assert str(runs.checkpoint(tmp_path, 4)) in warning
    with pytest.raises(UserError, match="damaged"):
        resolve(str(runs.checkpoint(tmp_path, 4)))
    damage_file(runs.checkpoint(tmp_path, 2) / SHARD, "truncated")
    run = runs.closed(tmp_path, *MLP)
    assert run.state.progress.step == 0  # none is left


def test_a_manifest_without_a_digest_is_read(tmp_path):
    """As checkpoints of format 3 were written before; nor does its layout matter."""
    runs.run_until(tmp_path, 2, *MLP)
    path = runs.checkpoint(tmp_path, 2) / MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(manifest.items()))))
    assert runs.closed(tmp_path, *MLP).state.progress.step == 2
    del manifest["sha256"]
    path.write_text(json.dumps(manifest, indent=1))
    assert runs.closed(tmp_path, *MLP).state.progress.step == 2
    assert damage(path.parent) is None


COPIES = ("step_00000001_backup", "step_best", "step_1", "step_000000001")


def test_only_checkpoints_are_ever_removed(tmp_path, caplog):
    """Copies beside them survive saving, pruning, going back and a restart, and are never taken for the newest."""
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in COPIES:
        shutil.copytree(runs.checkpoint(tmp_path, 1), folder / name)
    (folder / "step_00000050").mkdir()  # by name a checkpoint, but empty
    (folder / "step_00000060").write_text("a file")
    (folder / ".tmp-step_00000002").mkdir()  # a killed save's
    (folder / f".tmp-{'0a' * 16}").write_text("")
    (folder / ".tmp-removed-step_00000001-77").mkdir()
    for step in (9, 10, 11, 5, 6, 7):  # 5 goes back
        save(tmp_path, step, keep_last=2)
    kept = {*COPIES, "step_00000050", "step_00000060"}
    assert set(names(tmp_path)) == {*kept, "step_00000006", "step_00000007"}
    assert directory(tmp_path).newest() == runs.checkpoint(tmp_path, 7)
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step_00000007", "step_00000006"]
    assert len([text for text in own_messages(caplog) if "rolled back before it" in text]) == 2  # 10 and 11


def test_a_link_is_unlinked_and_not_followed(tmp_path):
    """A checkpoint moved to another disk and linked back: listed, used, and pruned by its name alone."""
    save(tmp_path, 1)
    elsewhere = tmp_path / "elsewhere"
    runs.checkpoint(tmp_path, 1).rename(elsewhere)
    runs.checkpoint(tmp_path, 1).symlink_to(elsewhere)
    (tmp_path / "checkpoints" / ".tmp-step_00000009").symlink_to(elsewhere)
    assert directory(tmp_path).newest() == runs.checkpoint(tmp_path, 1)
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step_00000002"]
    assert damage(elsewhere) is None
    runs.checkpoint(tmp_path, 3).symlink_to(tmp_path / "nowhere")
    save(tmp_path, 3, keep_last=1)
    assert damage(runs.checkpoint(tmp_path, 3)) is None
    assert not runs.checkpoint(tmp_path, 3).is_symlink()


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from states import directory, save, value
from trainapp.checkpoint.directory import checkpoints_in, damage
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
    problems = [damage(path) for path in checkpoints_in(found.folder)]
    newest = found.newest()
    step = int(newest.name[-8:])
    assert not any(problems), problems
    assert bool((value(newest) == step).all()), (value(newest), step)
    assert step > highest, (step, highest)
    assert found.best() is not None and damage(found.best()) is None
    highest = step
print(leftovers, highest)
"""


@pytest.mark.slow
def test_killed_while_saving_leaves_a_good_one(tmp_path):
    """kill -9 at twelve moments; every checkpoint under its final name is complete, and the newest step advances."""
    tests = Path(__file__).parents[1]
    path = [tests / "checkpoint", tests, tests / "helpers", *filter(None, [os.environ.get("PYTHONPATH")])]
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


def test_resolve(tmp_path):
    runs.run_until(tmp_path / "run", 4, *MLP, "every.save=2", "train.max_steps=6")
    newest, older = runs.checkpoint(tmp_path / "run", 4), runs.checkpoint(tmp_path / "run", 2)
    assert resolve(str(tmp_path / "run")) == newest
    assert resolve(str(tmp_path / "run" / "checkpoints")) == newest
    assert resolve(str(older)) == older
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a checkpoint nor a run directory"):
        resolve(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no such file or directory"):
        resolve(str(tmp_path / "nowhere"))


def test_an_older_format_is_refused_by_one_message(tmp_path):
    """Neither passed over, which would begin the run anew, nor taken for damage."""
    runs.run_until(tmp_path, 2, *MLP)
    path = runs.checkpoint(tmp_path, 2)
    write_manifest(path, {**read_manifest(path), "format": FORMAT - 1})
    message = rf"step_00000002 has format {FORMAT - 1}, but this version reads format {FORMAT}: .*mode=export"
    for folder, *named in ((tmp_path,), (tmp_path / "new", f"checkpointing.resume={path}")):
        with pytest.raises(UserError, match=message):
            runs.prepare(folder, *MLP, *named)
