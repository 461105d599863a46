"""A full disk costs lines of the record, not the run; where checkpoints cannot be written either, the run stops."""

import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
import runs

from trainapp.files import json_lines
from trainapp.tracking.tracker import Tracker

MLP = runs.MODELS["mlp"]


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "trainapp", *runs.TINY, *MLP, *overrides, f"hydra.run.dir={run_dir}"]


def complaints(text: str) -> list[str]:
    """The names of the files that could not be written and of trackers that failed, as often as that was said."""
    failed = re.findall(r"(tracker\.\w+) failed in \w+ \(OSError: ", text)  # others' tracebacks may be on its line
    return failed + sorted(Path(path).name for path in re.findall(r"^(/\S+) cannot be written", text, re.MULTILINE))


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path):
    """The kernel refuses this process any file of more than 8 kB: each is named once, and training continues."""

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))

    overrides = ("checkpointing=off", "train.max_steps=120", "every.eval=1")
    ended = subprocess.run(
        command(tmp_path / "run", *overrides),
        cwd=tmp_path,
        env=helpers.environment() | {"PYTHONDONTWRITEBYTECODE": "1"},  # cut bytecode would break later tests
        preexec_fn=limit_files,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert complaints(ended.stderr) == ["tracker.tensorboard", "evaluations.jsonl", "metrics.jsonl"]
    assert helpers.result(tmp_path / "run")["steps"] == 120
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size <= 8_000
    steps = [line["step"] for line in json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps[:3] == [1, 2, 3]
    assert len(steps) < 120


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MB; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


FILLING = ("user_packages=[filling]", "model._target_=filling.Filling", "train.max_steps=9", "every.eval=1")
FILLING_MODEL = '''
"""A model that fills the disk of `folder` in its fifth training step, and never tells."""

from pathlib import Path

from trainapp.models.mlp import MLP


class Filling(MLP):
    def __init__(self, image_shape, num_classes, folder: str = "", **arguments):
        super().__init__(image_shape, num_classes, **arguments)
        self.folder, self.calls = Path(folder), 0

    def forward(self, inputs):
        self.calls += self.training
        if self.training and self.calls == 5:
            with open(self.folder / "filler", "wb", buffering=0) as file:
                try:
                    while file.write(b"x" * 512):
                        pass
                except OSError:
                    pass
        return super().forward(inputs)
'''


def run_on(small_disk: Path, tmp_path: Path, run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
    (tmp_path / "filling.py").write_text(FILLING_MODEL)
    words = command(run_dir, *FILLING, f"+model.folder={small_disk}", *overrides)
    return subprocess.run(words, cwd=tmp_path, env=helpers.environment(), capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_for_checkpoints_too(small_disk, tmp_path, asynchronous):
    overrides = ("every.eval=3", "every.save=3", f"checkpointing.asynchronous={str(asynchronous).lower()}")
    ended = run_on(small_disk, tmp_path, small_disk / "run", *overrides)
    assert ended.returncode == 1, ended.stderr
    pattern = r"trainapp: the checkpoint of step (\d) could not be written to .*: \[Errno 28\] .* good one is (\S+)"
    told = re.findall(pattern, ended.stderr)
    assert len(told) == 1, ended.stderr
    # In the background the one of step 3 may still be being written when the disk is full.
    (number, last) = told[0][0], Path(told[0][1]).name
    assert (number, last) == ("6", "step_00000003") or (asynchronous and (number, last) == ("3", "none"))
    assert not list((small_disk / "run" / "checkpoints").glob(".tmp*"))


def test_room_again(tmp_path, caplog):
    """Each line is tried; it is said once. What was written in part costs the next line, too."""
    tracker, limits = Tracker(tmp_path, 0, None, {}), resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker.evaluated(1, 1, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (35, limits[1]))  # half of the next line fits
    try:
        tracker.evaluated(2, 2, {})
        tracker.evaluated(3, 3, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracker.evaluated(4, 4, {})
    tracker.evaluated(5, 5, {})
    tracker.close()
    assert [line["step"] for line in json_lines(tmp_path / "evaluations.jsonl")] == [1, 5]
    assert caplog.text.count("evaluations.jsonl cannot be written") == 1
