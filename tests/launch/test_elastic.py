"""Which failures of workers are followed by a restart, and which of the restarts count; signals to the launcher."""

import json
import multiprocessing
import signal
import subprocess
import sys
import time

import pytest
import torch

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.launch import elastic
from trainapp.launch.elastic import Failures, leave_error, signals_forwarded, workers_to_start
from trainapp.parallel.ranks import SingleRank
from trainapp.signals import Interrupted
from trainapp.sizes.record import RESTART, take_restart
from trainapp.torch_private import Restart


@pytest.fixture
def failures(tmp_path):
    return Failures(tmp_path)


def leave(run_dir, recoveries):
    (run_dir / RESTART).write_text(json.dumps({"micro": {}, "recoveries": recoveries}))


def fail(run_dir, error, step=3):
    (run_dir / "ranks").mkdir(exist_ok=True)
    error.__notes__ = [f"at step {step}"]
    leave_error(run_dir, 1, error)


def test_a_smaller_micro_batch_is_not_counted(tmp_path, failures):
    for recoveries in range(1, 7):
        leave(tmp_path, recoveries)
        assert failures.decide() is Restart.FREE
        assert take_restart(tmp_path, True, SingleRank()) == {"micro": {}, "recoveries": recoveries}
    assert failures.decide() is Restart.COUNTED  # nothing was left, as by killed workers
    assert failures.count == 1
    assert failures.for_memory == 6


def test_sizes_that_do_not_reach_the_workers_are_counted(tmp_path, failures):
    """They end before they read them, say."""
    leave(tmp_path, 1)
    assert [failures.decide() for _ in range(4)] == [Restart.FREE, Restart.COUNTED] * 2


def test_a_crash_between_does_not_make_them_count(tmp_path, failures):
    """It leads back to a checkpoint that knows of fewer recoveries."""
    for recoveries in (1, 2, None, 1, 2):
        if recoveries is None:
            assert failures.decide() is Restart.COUNTED
            continue
        leave(tmp_path, recoveries)
        assert failures.decide() is Restart.FREE
        take_restart(tmp_path, True, SingleRank())
    assert failures.count == 1


@pytest.mark.parametrize("name", [RESTART, "ranks/rank_0.error"])
@pytest.mark.parametrize("text", ["", "{}"])
def test_an_unreadable_file_is_counted(tmp_path, failures, name, text):
    (tmp_path / "ranks").mkdir()
    (tmp_path / name).write_text(text)
    assert failures.decide() is Restart.COUNTED


def test_a_repeated_error_is_refused_whatever_was_left(tmp_path, failures):
    for step in (3, 4):  # each for the first time
        fail(tmp_path, OSError("a slow disk"), step)
        assert failures.decide() is Restart.COUNTED
    fail(tmp_path, OSError("a slow disk"), 4)
    (tmp_path / RESTART).write_text(json.dumps({"recoveries": 1}))
    assert failures.decide() is Restart.REFUSED
    assert failures.incurable == "OSError: a slow disk (at step 4)"


@pytest.mark.parametrize("error", [ValueError("a mistake"), KeyError("x")])
def test_an_error_of_code_is_refused_at_once(tmp_path, failures, error):
    fail(tmp_path, error)
    assert failures.decide() is Restart.REFUSED
    assert failures.incurable.endswith(" (at step 3)")
    assert failures.count == 0


CAUSED = ValueError("no sample 7")
CAUSED.__cause__ = ConnectionResetError("reset")


@pytest.mark.parametrize(
    "error", [OSError("no space"), EOFError(), torch.OutOfMemoryError(), RuntimeError("a lost device"), CAUSED]
)
def test_an_error_that_may_come_from_outside_is_worth_a_restart(tmp_path, failures, error):
    fail(tmp_path, error)
    assert failures.decide() is Restart.COUNTED


def test_errors_of_an_earlier_run_are_none_of_this_one(tmp_path):
    fail(tmp_path, ValueError("a mistake"))
    assert Failures(tmp_path).decide() is Restart.COUNTED


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_fsdp_on_one_device_is_refused(strategy):
    """DDP there is a single device with the same result, which a sweep over devices may begin with."""
    own = ("model=mlp", "train.device=cpu", "parallel.devices=1")
    message = r"parallel=fsdp with parallel\.devices=1: .*; start more ranks, or use parallel=single"
    with pytest.raises(UserError, match=message):
        workers_to_start(compose.from_command_line([*own, f"parallel={strategy}"]))
    assert workers_to_start(compose.from_command_line([*own, "parallel=ddp"])) == 1


def test_a_signal_goes_to_the_workers_then_to_its_former_handler(failures, monkeypatch):
    """The launcher waits for workers, which it does not restart; a second signal ends it."""
    passed_on = []
    former = signal.signal(signal.SIGUSR1, lambda number, _: passed_on.append(number))
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    try:
        with signals_forwarded(failures):
            worker.start()
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # to the group: the same one
            worker.join(30)
            assert failures.decide() is Restart.REFUSED
            monkeypatch.setattr(elastic, "ECHO", 0.0)
            with pytest.raises(Interrupted):
                signal.raise_signal(signal.SIGUSR1)
            assert passed_on == []
        assert passed_on == [signal.SIGUSR1]
    finally:
        worker.kill()
        signal.signal(signal.SIGUSR1, former)


STARTED = """
import os, signal, sys, time
from torch.multiprocessing.spawn import start_processes
from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.launch import elastic

def interrupted(config):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def rank(number, name):
    elastic.run_worker = interrupted
    {"started": elastic._run_started, "run_worker": interrupted}[name](None)

if __name__ == "__main__":
    start_processes(rank, (sys.argv[1],), nprocs=1, start_method="fork")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("function", "status"), [("started", "terminated with exit code 130"), ("run_worker", "")])
def test_ctrl_c_before_a_rank_hears_signals_is_seen_by_the_launcher(tmp_path, function, status):
    """torch takes the KeyboardInterrupt of the second one for a success, without a result to wait for."""
    (tmp_path / "ranks.py").write_text(STARTED)
    done = subprocess.run(
        [sys.executable, "ranks.py", function], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode == 0) == (not status)
    assert status in done.stderr
