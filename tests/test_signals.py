"""Ctrl-C and SIGTERM, sent to the real program."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import helpers
import pytest
import runs

from trainapp.signals import StopRequest

# The module slows each step down, so that a signal arrives in the middle of the run, not after it.
SLOW_MODEL = """
import time
from trainapp.models.mlp import MLP


class SlowMLP(MLP):
    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, seconds: float = 0.05):
        super().__init__(image_shape, num_classes, width=16, dropout=0.1)
        self.seconds = seconds

    def forward(self, images):
        time.sleep(self.seconds)
        return super().forward(images)
"""
SETTINGS = (
    *runs.own_model("slow_model.SlowMLP"),
    "user_packages=[slow_model]",
    "train.device=cpu",
    "train.max_epochs=null",
    "every.eval=null",
    "every.save=null",
    "every.log=1",
)

HANDLED_OUTSIDE = """
import signal
import sys
from pathlib import Path


def queue_again(number, frame):
    print("queued again with", len(list(Path("run/checkpoints").glob("step_*"))), "checkpoints", flush=True)
    sys.exit(7)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, queue_again)
    from trainapp.__main__ import main

    main()
"""


def start(folder, run_dir, *overrides, **options):
    (folder / "slow_model.py").write_text(SLOW_MODEL)
    command = [sys.executable, "-m", "trainapp", *SETTINGS, *overrides, f"hydra.run.dir={run_dir}"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=helpers.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for_steps(run_dir, steps, process):
    helpers.wait_until(lambda: helpers.lines_in(run_dir / "metrics.jsonl") >= steps, process)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 2)])
def test_saves_and_continues_as_if_never_stopped(tmp_path, monkeypatch, number, code, workers):
    """The step is finished and saved; the printed command, run verbatim, ends with the same weights."""
    folder = tmp_path / "with a blank"
    folder.mkdir()
    run_dir = folder / "stopped run"
    process = start(folder, run_dir, "train.max_steps=40", f"data.num_workers={workers}")
    wait_for_steps(run_dir, 4, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert f"{signal.Signals(number).name}: finishing the step, then saving" in errors
    saved = list((run_dir / "checkpoints").glob("step_*"))
    assert len(saved) == 1
    step = int(saved[0].name[-8:])
    assert 4 <= step < 40
    assert helpers.metrics(run_dir)[-1]["step"] == step

    command = re.search(r"Resume with:\n  (.*)\n", output)[1]
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = helpers.run_cli(*arguments, cwd=folder, command=[sys.executable])
    assert done.returncode == 0, done.stderr
    assert f"step {step}" in done.stderr
    monkeypatch.syspath_prepend(folder)
    settings = ("batch.global_size=64", "memory.guard=true", "train.max_steps=40", "+model.seconds=0.0")
    runs.run(folder / "whole", *SETTINGS, *settings)
    for part in ("model", "optimizer", "progress"):
        assert runs.differences(runs.saved(run_dir, 40)[part], runs.saved(folder / "whole", 40)[part]) == []
    losses = [[line["loss"] for line in helpers.metrics(path)] for path in (run_dir, folder / "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 40


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path):
    """In the middle of a step that takes half a minute, with no checkpoint."""
    process = start(tmp_path, tmp_path / "run", "train.max_steps=40", "train.check_loss=false", "+model.seconds=30")
    deadline = time.monotonic() + 60
    while "samples" not in process.stderr.readline():  # the plan: training is about to begin
        assert time.monotonic() < deadline
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert "SIGINT: finishing the step" in process.stderr.readline()
    assert process.poll() is None
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert time.monotonic() - sent < 2
    process.communicate()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_reaches_the_loaders_workers_too(tmp_path):
    """The whole process group gets the signal: the step must still get its data, and one line reports the signal."""
    process = start(tmp_path, tmp_path / "run", "train.max_steps=60", "data.num_workers=2", start_new_session=True)
    wait_for_steps(tmp_path / "run", 4, process)
    sent = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1
    assert time.monotonic() - sent < 8
    assert errors.count("finishing the step") == 1


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [(), ("parallel=ddp", "parallel.devices=2")])
def test_who_handled_a_signal_before_gets_it_after_the_save(tmp_path, parallel):
    """As in a submitit job, whose own handler requeues it."""
    (tmp_path / "job.py").write_text(HANDLED_OUTSIDE)
    (tmp_path / "slow_model.py").write_text(SLOW_MODEL)
    words = [*SETTINGS, *parallel, "train.max_steps=400", "hydra.run.dir=run"]
    process = subprocess.Popen(
        [sys.executable, "job.py", *words], cwd=tmp_path, env=helpers.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_steps(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 7, output
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1
    assert output.index("Resume with") < output.index("queued again with 1 checkpoints")


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest() as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
