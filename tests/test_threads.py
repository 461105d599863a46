"""Plain `pytest` computes on one thread, as scripts/test does."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

CHECK = "import conftest, os, torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"


def threads(**variables):
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(command, cwd=ROOT / "tests", env=env | variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_one_thread_unless_the_environment_says_otherwise():
    assert threads() == ["1", "1"]
    assert threads(OMP_NUM_THREADS="2") == ["2", "2"]
