"""The scripts that simulate two hosts and a Slurm on one machine. Run where permissions and tools allow."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.slow


def needs(*tools):
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(os.geteuid() != 0 or bool(missing), reason=f"needs root and {', '.join(tools)}")


def script(name, folder, *overrides):
    done = subprocess.run(
        [SCRIPTS / name, *overrides],
        cwd=folder,
        env=environment({"PYTHON": sys.executable, "TMPDIR": str(folder)}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("ip")
def test_two_hosts(tmp_path):
    settings = ("model=mlp", "train.max_epochs=null", "train.max_steps=4", "every.eval=null")
    assert "both nodes succeeded" in script("two_hosts", tmp_path, *settings)


@needs("slurmctld", "slurmd", "srun", "munged")
def test_one_slurm(tmp_path):
    told = script("one_slurm", tmp_path)
    assert "stopped, requeued, resumed from" in told
    assert "two jobs of two tasks succeeded" in told
