"""docs/porting.md: the port of its script has the same losses."""

import subprocess

import pytest
from helpers import ROOT, environment, metrics
from markdown import commands, with_this_python, write_files

DOCUMENT = ROOT / "docs/porting.md"


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """By program: the script's, and the run's."""
    folder = tmp_path_factory.mktemp("port")
    write_files(DOCUMENT, folder)
    printed = []
    for words in commands(DOCUMENT):
        done = subprocess.run(
            with_this_python(words), cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    (run,) = (path.parent for path in folder.glob("outputs/*/*/result.json"))
    return [float(line) for line in printed[0].split()], [line["loss"] for line in metrics(run)]


@pytest.mark.slow
def test_the_losses_are_equal(losses):
    script, port = losses
    assert len(script) == len(port) == 20
    assert port == pytest.approx(script, rel=1e-5)
