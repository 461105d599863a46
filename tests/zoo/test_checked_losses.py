"""The check of the loss before the first step, over the zoo: no trace in any cell, and no false alarm."""

import pytest

from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner
from trainapp.signals import StopRequest
from trainapp.training import exactness
from trainapp.training.engine import Totals

from . import catalogue
from .catalogue import ALL
from .harness import configure

pytestmark = pytest.mark.usefixtures("one_thread")


def start(name, run_dir, checks):
    """All that the first step begins with."""
    cell = ALL[name]
    catalogue.as_in_a_new_process(cell)
    run = runner.prepare(configure(cell, run_dir, {"train.check_loss": checks}), StopRequest(), SingleRank())
    run.close()
    return exactness.outcome(run, Totals())


@pytest.mark.parametrize("name", ALL)
def test_no_trace_and_no_false_alarm(tmp_path, name):
    expected = start(name, tmp_path / "unchecked", False)
    assert start(name, tmp_path / "checked", True) == expected
