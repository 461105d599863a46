"""A full disk costs lines of the record, not the run. Where a checkpoint cannot be written: test_checkpointer.py."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import runs

from trainapp.files import json_lines
from trainapp.tracking.loggers import Start
from trainapp.tracking.tracker import Tracker


def complaints(text: str) -> list[str]:
    """The names of the files that could not be written and of trackers that failed, as often as that was said."""
    failed = re.findall(r"(tracker\.\w+) failed in \w+ \(OSError: ", text)  # others' tracebacks may be on its line
    return failed + sorted(Path(path).name for path in re.findall(r"^(/\S+) cannot be written", text, re.MULTILINE))


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path):
    """The kernel refuses this process any file of more than 8 kB: each is named once, and training continues."""

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))

    overrides = (*runs.TINY, *runs.MODELS["mlp"], "checkpointing=off", "train.max_steps=120", "every.eval=1")
    ended = subprocess.run(
        [sys.executable, "-m", "trainapp", *overrides, f"hydra.run.dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=helpers.environment() | {"PYTHONDONTWRITEBYTECODE": "1"},  # cut bytecode would break later tests
        preexec_fn=limit_files,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert complaints(ended.stderr) == ["tracker.tensorboard", "evaluations.jsonl", "metrics.jsonl", "report.html"]
    assert helpers.result(tmp_path / "run")["steps"] == 120
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size <= 8_000
    steps = [line["step"] for line in json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps[:3] == [1, 2, 3]
    assert len(steps) < 120


def test_room_again(tmp_path, caplog):
    """Each line is tried; it is said once. What was written in part costs the next line, too."""
    tracker, limits = Tracker(Start(tmp_path, 0, {}, continues=True)), resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker.log_evaluation(1, 1, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (35, limits[1]))  # half of the next line fits
    try:
        tracker.log_evaluation(2, 2, {})
        tracker.log_evaluation(3, 3, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracker.log_evaluation(4, 4, {})
    tracker.log_evaluation(5, 5, {})
    tracker.close()
    assert [line["step"] for line in json_lines(tmp_path / "evaluations.jsonl")] == [1, 5]
    assert caplog.text.count("evaluations.jsonl cannot be written") == 1
