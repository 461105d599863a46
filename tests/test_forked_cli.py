"""A run in a fork is what it is when started by itself; see `forked_cli`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_cli
import helpers
import pytest
import runs

pytestmark = pytest.mark.slow

SLEEPS = """
import time
from torch import nn

class Model(nn.Linear):
    def __init__(self):
        {}
        super().__init__(64, 10)
"""


def test_same_weights_and_output(tmp_path):
    words = [*runs.MODELS["mlp"], "train.max_steps=3"]
    real = [sys.executable, "-B", "-m", "trainapp"]  # not the command that is forked
    forked = helpers.train(tmp_path / "forked", *words)
    started = helpers.train(tmp_path / "started", *words, command=real)
    assert runs.differences(runs.saved(tmp_path / "forked", 3), runs.saved(tmp_path / "started", 3)) == []
    shown = [[line.partition(" ")[0] for line in done.stdout.splitlines()] for done in (forked, started)]
    assert shown[0] == shown[1]
    assert len(shown[0]) > 5


def test_status_of_a_killed_run_and_a_time_limit(tmp_path):
    words = ["user_packages=[mine]", "model._target_=mine.Model", f"hydra.run.dir={tmp_path / 'run'}"]
    (tmp_path / "mine.py").write_text(SLEEPS.format("import os; os.kill(os.getpid(), 9)"))
    assert helpers.run_cli(*words, cwd=tmp_path).returncode == -signal.SIGKILL
    (tmp_path / "mine.py").write_text(SLEEPS.format("open('pid', 'w').write(str(os.getpid())); time.sleep(60)"))
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(f"import os\n{text}")
    with pytest.raises(subprocess.TimeoutExpired):
        helpers.run_cli(*words, cwd=tmp_path, timeout=8)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):  # killed, but not gone at once
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the run outlived its time limit")


def test_only_for_the_environment_of_the_imports(monkeypatch):
    def can_fork(command=helpers.PROGRAM, **changes):
        return forked_cli.can_fork(command, helpers.environment(changes))

    assert can_fork()
    assert can_fork(TRAINAPP_CACHE="elsewhere")
    assert not can_fork(OMP_NUM_THREADS="2")
    assert not can_fork([*helpers.PROGRAM[:2], "pytest"])
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert not can_fork()
