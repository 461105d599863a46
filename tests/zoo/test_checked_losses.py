"""The check of the loss before the first step leaves no trace. False alarms would end cells of test_zoo.py."""

import pytest

from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.training import exactness
from trainapp.training.engine import Totals

from . import catalogue
from .catalogue import ALL, BATCHES
from .harness import configure

pytestmark = pytest.mark.usefixtures("one_thread")


def start(name, run_dir, checks):
    """All that the first step begins with."""
    cell = ALL[name]
    catalogue.as_in_a_new_process(cell)
    run = runner.prepare(configure(cell, run_dir, {"train.check_loss": checks}), StopRequest(), SingleRank())
    run.close()
    return exactness.outcome(run, Totals())


@pytest.mark.parametrize("name", [name for name in ALL if name not in BATCHES])  # those leave nothing behind
def test_no_trace(tmp_path, name):
    expected = start(name, tmp_path / "unchecked", False)
    assert start(name, tmp_path / "checked", True) == expected
