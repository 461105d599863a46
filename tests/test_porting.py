"""docs/porting.md: the port of its script has the same losses."""

import pytest
from helpers import ROOT, metrics
from markdown import commands, run_command, write_files

DOCUMENT = ROOT / "docs/porting.md"


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """By program: the script's, and the run's."""
    folder = tmp_path_factory.mktemp("port")
    write_files(DOCUMENT, folder)
    printed = []
    for words in commands(DOCUMENT):
        done = run_command(words, folder, timeout=120)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    (result,) = folder.glob("outputs/*/*/result.json")
    return [float(line) for line in printed[0].split()], [line["loss"] for line in metrics(result.parent)]


@pytest.mark.slow
def test_the_losses_are_equal(losses):
    script, port = losses
    assert len(script) == len(port) == 20
    assert port == pytest.approx(script, rel=1e-5)
