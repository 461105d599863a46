"""Checks for `scripts/check_gpu` that go wrong in every way that a real one may: run with `-k` of one name."""

import os
import signal
import subprocess
import sys
import time

import pytest


def test_good(device, got, tmp_path):
    """one and one is two

    More is not in the table.
    """
    got("2")
    got(f"on {device} | in {tmp_path.name}")


def test_plain():
    assert True


def test_missed(got):
    """2"""
    got("3 | 4")
    raise ValueError("first line\nsecond line")


def test_left_out(needs_cuda):
    """on a GPU"""


def test_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def test_never_ends(tmp_path):
    """It also leaves a process of a session of its own, as a launcher's worker may be."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (tmp_path.parent / "child").write_text(str(child.pid))
    time.sleep(600)


@pytest.fixture
def broken():
    raise RuntimeError("no such thing")


def test_fails(broken):
    pass
