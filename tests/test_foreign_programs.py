"""benchmarks/foreign_programs.py, on small programs in the shape of those that it is for (stand_ins/)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment

pytestmark = pytest.mark.slow
STAND_INS = ROOT / "tests/stand_ins"
STEPS = ("--steps", "10")


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/foreign_programs.py"), str(checkout), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


def test_an_example_is_compared(tmp_path):
    done = run(STAND_INS / "examples", "--programs", "vae", *STEPS, "--json", str(tmp_path / "found"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())["vae"]
    assert found["original"] < 1e-5
    assert found["limited"] < 1e-5
    assert found["retries"] > 0
    assert found["is_resumed_exactly"]


@pytest.mark.nightly
def test_a_flat_script_is_compared():
    done = run(STAND_INS / "nanogpt", *STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| nanogpt |" in done.stdout


def test_lbfgs_is_shown_by_its_message():
    done = run(STAND_INS / "examples", "--programs", "time_sequence_prediction", *STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch.optim.LBFGS: its step requires a closure" in done.stdout


def test_another_loop_is_found_out(tmp_path):
    """One that trains at another rate: only the first loss is that of the port."""
    checkout = tmp_path / "examples"
    shutil.copytree(STAND_INS / "examples", checkout)
    script = checkout / "word_language_model/main.py"
    script.write_text(script.read_text().replace("alpha=-lr", "alpha=-1.01 * lr"))
    done = run(checkout, "--programs", "word_language_model", *STEPS)
    assert done.returncode == 1
    assert "losses differ from the original's by" in done.stderr
