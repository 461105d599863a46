"""Which failures of workers are followed by a restart, and which of the restarts count."""

import json

import pytest
import torch

from trainapp.launch.elastic import Failures
from trainapp.launch.worker import _error_file, _leave_error
from trainapp.oom import handover
from trainapp.parallel.ranks import SingleRank
from trainapp.torch_elastic import Restart

RANKS = [0, 1]


@pytest.fixture
def failures(tmp_path):
    return Failures(tmp_path)


def leave_error(run_dir, error, step=3):
    path = _error_file(run_dir, 1)
    path.parent.mkdir(exist_ok=True)
    error.__notes__ = [f"at step {step}"]
    _leave_error(run_dir, 1, error)


def test_a_smaller_micro_batch_is_not_counted(tmp_path, failures):
    for recoveries in range(1, 7):
        handover.leave(tmp_path, {"micro": {}, "oom_restarts": recoveries})
        assert failures.decide(RANKS) is Restart.FREE
        assert handover.take(tmp_path, True, SingleRank()) == {"micro": {}, "oom_restarts": recoveries}
    assert failures.decide(RANKS) is Restart.COUNTED  # nothing was left
    assert failures.count == 1
    assert failures.for_memory == 6


def test_sizes_that_do_not_reach_the_workers_are_counted(tmp_path, failures):
    """On another node's disk, say: they find the same size again, and fail again, with the same count."""
    handover.leave(tmp_path, {"micro": {}, "oom_restarts": 1})
    assert [failures.decide(RANKS) for _ in range(4)] == [Restart.FREE, Restart.COUNTED] * 2


def test_a_crash_between_does_not_make_them_count(tmp_path, failures):
    """It leads back to a checkpoint that knows of fewer recoveries."""
    for recoveries in (1, 2, None, 1, 2):
        if recoveries is None:
            assert failures.decide(RANKS) is Restart.COUNTED
            continue
        handover.leave(tmp_path, {"micro": {}, "oom_restarts": recoveries})
        assert failures.decide(RANKS) is Restart.FREE
        handover.take(tmp_path, True, SingleRank())
    assert failures.count == 1


def test_killed_workers_are_counted(failures):
    assert [failures.decide(RANKS) for _ in range(2)] == [Restart.COUNTED] * 2
    assert failures.count == 2
    assert failures.for_memory == 0
