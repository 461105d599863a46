"""How many workers are started, and what signals do to them and to the launcher."""

import multiprocessing
import signal
import subprocess
import sys
import time

import pytest

from trainapp.config import compose
from trainapp.errors import UserError
from trainapp.launch import forwarded_signals
from trainapp.launch.devices import workers_to_start
from trainapp.launch.forwarded_signals import ReceivedSignal, signals_forwarded
from trainapp.signals import Interrupted


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_fsdp_on_one_device_is_refused(strategy):
    """DDP there is a single device with the same result, which a sweep over devices may begin with."""
    one_device = ("model=mlp", "train.device=cpu", "parallel.devices=1")
    message = r"parallel=fsdp with parallel\.devices=1: .*; start more ranks, or use parallel=single"
    with pytest.raises(UserError, match=message):
        workers_to_start(compose.from_command_line([*one_device, f"parallel={strategy}"]))
    assert workers_to_start(compose.from_command_line([*one_device, "parallel=ddp"])) == 1


def test_a_signal_goes_to_the_workers_then_to_its_former_handler(monkeypatch):
    """The launcher waits for workers; a second signal ends it."""
    received = ReceivedSignal()
    passed_on = []
    former = signal.signal(signal.SIGUSR1, lambda number, _: passed_on.append(number))
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    try:
        with signals_forwarded(received):
            worker.start()
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # to the group: the same one
            worker.join(30)
            assert worker.exitcode == -signal.SIGUSR1
            assert received.number == signal.SIGUSR1
            monkeypatch.setattr(forwarded_signals, "ECHO", 0.0)
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
from trainapp.launch import worker

def interrupted(config):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def rank(number, name):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
    worker.run_worker = interrupted
    {"run_in_started_process": worker.run_in_started_process, "run_worker": interrupted}[name](None)

if __name__ == "__main__":
    start_processes(rank, (sys.argv[1],), nprocs=1, start_method="fork")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "status"), [("run_in_started_process", "terminated with exit code 130"), ("run_worker", "")]
)
def test_ctrl_c_before_a_rank_hears_signals_is_seen_by_the_launcher(tmp_path, function, status):
    """torch takes the KeyboardInterrupt of the second one for a success, without a result to wait for."""
    (tmp_path / "ranks.py").write_text(STARTED)
    done = subprocess.run(
        [sys.executable, "ranks.py", function], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode == 0) == (not status)
    assert status in done.stderr
