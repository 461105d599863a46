"""Foreign models, batches, losses and data sets keep the promise: bit for bit the replay of their schedule."""

import pytest
import torch

from trainapp.parallel.ranks import SingleRank
from trainapp.run.prepare import SessionStart, prepare
from trainapp.signals import StopRequest
from trainapp.training import exactness
from trainapp.training.engine import Totals

from . import catalogue, cells
from .by_hand import train_by_hand
from .catalogue import ALL, BATCHES, STATEFUL
from .harness import configure

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_errors_leave_no_trace(tmp_path, name):
    assert cells.after_three_errors(name, tmp_path) == []


# In phases and at steps where the test above has none: together, an early and a late one per phase; each cell has two
# of the four, which the next cell has the other way about. Other phases: tests/oom/test_grid.py, on shipped models.
ERRORS = (("forward", 4), ("backward", 1), ("evaluate", 4), ("commit", 4))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "phase", "step"),
    [(name, *ERRORS[turn]) for number, name in enumerate(ALL) for turn in ((0, 3), (1, 2))[number % 2]],
)
def test_an_error_leaves_no_trace(tmp_path, name, phase, step):
    assert cells.after_an_error(name, phase, step, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, cell in ALL.items() if cell.sums])
def test_an_error_late_in_an_evaluation_counts_no_sample_twice(tmp_path, name):
    assert cells.after_an_error_late_in_an_evaluation(name, tmp_path) == []


# These have state that only the checkpoint can bring back.
RESUMED = (
    *("moco", "hidden teacher", "actnorm", "buffer through numpy", "writes in evaluation", "own generators", "queue"),
    *STATEFUL,
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in RESUMED else pytest.mark.nightly)
        for name, cell in ALL.items()
        if cell.resumes
    ],
)
def test_resumed_equals_uninterrupted(tmp_path, name):
    assert cells.resumed(name, tmp_path) == []


@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_is_cut_by_its_samples(tmp_path, name):
    """Each forward has the samples that the schedule says, and the result is that of a plain loop over the data set."""
    training = cells.finished(name, tmp_path, {"every.eval": 4, "every.log": 1}, cells.fault(name, "forward", 2))
    sizes = [[len(micro) for micro in step] for _, step in sorted(training.trained.items())]
    assert sizes == [[8, 8], [4, 4, 4, 4], [4, 4], [4, 4, 4, 4]]  # 40 samples: the third step ends the epoch
    wanted = train_by_hand(training)
    torch.testing.assert_close([line["loss"] for line in training.record().logged], wanted.losses, rtol=1e-4, atol=1e-6)
    assert training.record().evaluations[-1]["loss"] == pytest.approx(wanted.evaluation, rel=1e-4)
    for parameter, by_hand in zip(training.run.state.model.parameters(), wanted.parameters, strict=True):
        torch.testing.assert_close(parameter, by_hand, rtol=1e-3, atol=2e-5)


def start(name, run_dir, checks):
    """All that the first step begins with."""
    cell = ALL[name]
    catalogue.as_in_a_new_process(cell)
    run = prepare(SessionStart(configure(cell, run_dir, {"train.check_loss": checks})), StopRequest(), SingleRank())
    run.close()
    return exactness.outcome(run, Totals())


@pytest.mark.parametrize("name", [name for name in ALL if name not in BATCHES])  # those leave nothing behind
def test_the_check_of_the_loss_leaves_no_trace(tmp_path, name):
    """False alarms would end the cells above."""
    assert start(name, tmp_path / "checked", True) == start(name, tmp_path / "unchecked", False)
