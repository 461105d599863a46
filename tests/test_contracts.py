"""The import contracts in pyproject.toml catch what they are for. scripts/test checks that the code keeps them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment

LINT = Path(sys.executable).with_name("lint-imports")
ROOMS = "A room imports only the rooms below it"
TORCH = "--help, --cfg and mistakes in settings do not wait for torch"


def broken(folder):
    """The names of the contracts that the code in `folder` breaks."""
    done = subprocess.run(
        [LINT, "--no-logo", "--no-cache"],
        cwd=folder,
        env=environment({"PYTHONPATH": str(folder / "src")}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    verdicts = [line for line in done.stdout.splitlines() if " KEPT" in line or " BROKEN" in line]
    assert len(verdicts) == 2, done.stdout + done.stderr
    return {line.partition(" BROKEN")[0] for line in verdicts if " BROKEN" in line}


@pytest.fixture
def checkout(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("data/batch.py", "from trainapp.training import loop", ROOMS),
        ("units.py", "from trainapp import errors", ROOMS),
        ("new_room.py", "", ROOMS),
        ("config/excludes.py", "import torch", TORCH),
        ("__main__.py", "from trainapp.launch import elastic", TORCH),
    ],
)
def test_an_import_that_should_not_be_is_caught(checkout, module, line, contract):
    with (checkout / "src/trainapp" / module).open("a") as file:
        file.write(f"\n{line}\n")
    assert broken(checkout) == {contract}


def test_the_code_as_it_is_keeps_both(checkout):
    assert broken(checkout) == set()
