"""The terminal: a live bar on a terminal, lines elsewhere."""

import contextlib
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from helpers import environment
from runs import MODELS, TINY

from trainapp.tracking.terminal import Progress, bar_text, is_live


def test_lines_where_there_is_no_terminal(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(total=20, step=10)
    progress.advance(15)
    progress.show(15, {"loss": "0.5", "memory": "1 MiB / 2 MiB"})
    assert re.fullmatch(r"step 15/20 \| loss 0\.5 \| memory 1 MiB / 2 MiB \| \d\d:\d\d left", caplog.messages[-1])
    Progress(total=None, step=0).show(3, {"loss": "0.5"})
    assert caplog.messages[-1] == "step 3/? | loss 0.5 | ? left"


@pytest.mark.parametrize("name", ["NO_COLOR", "CI"])
def test_lines_on_a_terminal_that_asks_for_them(monkeypatch, name):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for variable in ("NO_COLOR", "CI"):
        monkeypatch.delenv(variable, raising=False)
    assert is_live()
    monkeypatch.setenv(name, "1")
    assert not is_live()
    assert [bar_text(share) for share in (0.0, 0.5, 2.0)] == ["[--------]", "[####----]", "[########]"]


def on_a_terminal(command, cwd):
    """The output of a command on a dedicated terminal, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))  # rows, columns
    env = environment({"CI": "", "NO_COLOR": ""})
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    return shown.decode(), process.wait(timeout=60)


@pytest.mark.slow
def test_live_bar_and_summary_on_a_terminal(tmp_path):
    overrides = (*MODELS["mlp"], *TINY, "train.max_steps=200", "every.log=20", "every.eval=100")
    shown, code = on_a_terminal([sys.executable, "-m", "trainapp", *overrides], tmp_path)
    assert code == 0
    assert re.search(
        r"MLP with \S+ parameters on cpu, fp32; global batch 16 = micro-batch 16 x 1 accumulated x 1 rank", shown
    )
    bars = re.findall(r"(\d+)%\|.{20}\| (\d+)/200([^\r\n]*)", shown)
    assert len(bars) >= 2
    assert all(abs(int(percent) - int(step) / 2) <= 0.5 for percent, step, _ in bars)
    last = bars[-1][2]
    for name in ("loss", "accuracy", "samples/s", "memory", "left"):
        assert name in last
    assert re.search(r"memory \[#*-*\] [\d.]+ \w+ / ", last)
    for row in (
        "eval accuracy",
        "time",
        "throughput",
        "peak memory",
        "micro-batch",
        "OOM retries",
        "outputs",
        "TensorBoard",
    ):
        assert re.search(rf"^{row} +\S", shown, re.MULTILINE), row
    assert not re.search(r"^step \d+/200", shown, re.MULTILINE)  # these lines are only for output without a bar
    command = re.search(r"^TensorBoard +tensorboard --logdir (\S+)", shown, re.MULTILINE)[1]
    assert (tmp_path / command / "tensorboard").is_dir()
