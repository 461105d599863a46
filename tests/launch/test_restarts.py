"""Which failures of workers are followed by a restart, and which of the restarts count."""

import json
import os

import pytest
import torch

from trainapp.launch.forwarded_signals import ReceivedSignal
from trainapp.launch.restarts import RestartPolicy, write_error
from trainapp.parallel.ranks import SingleRank
from trainapp.sizes.record import RESTART, take_restart
from trainapp.torch_private import Restart


@pytest.fixture
def policy(tmp_path):
    return RestartPolicy(tmp_path, ReceivedSignal())


def leave_size(run_dir, recoveries):
    """As workers that restart with a smaller micro-batch."""
    (run_dir / RESTART).write_text(json.dumps({"micro": {}, "recoveries": recoveries}))


def fail(run_dir, error, step=3):
    """As a rank that ends with this error."""
    (run_dir / "ranks").mkdir(exist_ok=True)
    error.__notes__ = [f"at step {step}"]
    write_error(run_dir, 1, error)


def test_a_smaller_micro_batch_is_not_counted(tmp_path, policy):
    for recoveries in range(1, 7):
        leave_size(tmp_path, recoveries)
        assert policy.decide() is Restart.FREE
        assert take_restart(tmp_path, True, SingleRank()) == {"micro": {}, "recoveries": recoveries}
    assert policy.decide() is Restart.COUNTED  # nothing was left, as by killed workers
    assert policy.counted == 1
    assert policy.memory_restarts == 6


def test_sizes_that_do_not_reach_the_workers_are_counted(tmp_path, policy):
    """They end before they read them, say."""
    leave_size(tmp_path, 1)
    assert [policy.decide() for _ in range(4)] == [Restart.FREE, Restart.COUNTED] * 2


def test_a_crash_between_does_not_make_them_count(tmp_path, policy):
    """It leads back to a checkpoint that knows of fewer recoveries."""
    for recoveries in (1, 2, None, 1, 2):
        if recoveries is None:
            assert policy.decide() is Restart.COUNTED
            continue
        leave_size(tmp_path, recoveries)
        assert policy.decide() is Restart.FREE
        take_restart(tmp_path, True, SingleRank())
    assert policy.counted == 1


@pytest.mark.parametrize("name", [RESTART, "ranks/rank_0.error"])
@pytest.mark.parametrize("text", ["", "{}"])
def test_an_unreadable_file_is_counted(tmp_path, policy, name, text):
    (tmp_path / "ranks").mkdir()
    (tmp_path / name).write_text(text)
    assert policy.decide() is Restart.COUNTED


def test_a_repeated_error_is_refused_whatever_was_left(tmp_path, policy):
    for step in (3, 4):  # each for the first time
        fail(tmp_path, OSError("a slow disk"), step)
        assert policy.decide() is Restart.COUNTED
    fail(tmp_path, OSError("a slow disk"), 4)
    leave_size(tmp_path, 1)
    assert policy.decide() is Restart.REFUSED
    assert policy.incurable_error == "OSError: a slow disk (at step 4)"


@pytest.mark.parametrize("error", [ValueError("a mistake"), KeyError("x")])
def test_an_error_of_code_is_refused_at_once(tmp_path, policy, error):
    fail(tmp_path, error)
    assert policy.decide() is Restart.REFUSED
    assert policy.incurable_error.endswith(" (at step 3)")
    assert policy.counted == 0


@pytest.mark.parametrize("error", [KeyError("peer_embedding"), ValueError("gloo"), KeyError("nccl")])
def test_an_error_of_code_that_names_a_backend_is_one(tmp_path, policy, error):
    fail(tmp_path, error)
    assert policy.decide() is Restart.REFUSED


@pytest.mark.parametrize("text", ["size mismatch for peer_embedding.weight", "a lost device"])
def test_a_runtime_error_of_a_rank_is_its_own(tmp_path, text):
    (tmp_path / "ranks").mkdir()
    assert write_error(tmp_path, 1, RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"),
        RuntimeError("NCCL error: remote process exited"),
        torch.distributed.DistNetworkError("a broken pipe"),
    ],
)
def test_a_lost_connection_is_no_error_of_a_rank(tmp_path, error):
    (tmp_path / "ranks").mkdir()
    assert not write_error(tmp_path, 1, error)


CAUSED = ValueError("no sample 7")
CAUSED.__cause__ = ConnectionResetError("reset")


@pytest.mark.parametrize(
    "error", [OSError("no space"), EOFError(), torch.OutOfMemoryError(), RuntimeError("a lost device"), CAUSED]
)
def test_an_error_that_may_come_from_outside_is_worth_a_restart(tmp_path, policy, error):
    fail(tmp_path, error)
    assert policy.decide() is Restart.COUNTED


def test_errors_of_an_earlier_run_are_none_of_this_one(tmp_path):
    fail(tmp_path, ValueError("a mistake"))
    assert RestartPolicy(tmp_path, ReceivedSignal()).decide() is Restart.COUNTED


def test_earlier_checkpoints_are_none_of_this_run(tmp_path):
    """Also one that the run replaces by another of the same step."""
    manifest = tmp_path / "checkpoints/step_00000002/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    os.utime(manifest, ns=(0, 0))
    policy = RestartPolicy(tmp_path, ReceivedSignal())
    assert not policy.has_saved()
    manifest.write_text("{}")
    assert policy.has_saved()


def test_nothing_is_restarted_after_a_signal(tmp_path):
    policy = RestartPolicy(tmp_path, ReceivedSignal(15))
    assert policy.decide() is Restart.REFUSED
    assert policy.incurable_error is None
