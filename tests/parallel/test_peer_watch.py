"""A rank that waits outside of Python, as in NCCL, ends as soon as another one has run out of memory."""

import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from helpers import environment

from trainapp.parallel import peer_watch
from trainapp.parallel.peer_watch import PeerWatch

WAITING = """
import ctypes
import os
import sys

import torch.distributed as dist

from trainapp.parallel.peer_watch import PeerWatch

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
PeerWatch(store, lambda: os._exit(82))
store.set("waits", "")
while True:  # a signal interrupts one sleep; its handler in Python would not run before the end of the loop
    ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_waiting_rank_ends_at_once():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", WAITING, str(store.port)]
    with subprocess.Popen(command, env=environment({})) as process:
        store.wait(["waits"])
        time.sleep(2 * peer_watch.INTERVAL)
        assert process.poll() is None
        started = time.monotonic()
        PeerWatch(store, lambda: None).announce()
        assert process.wait(timeout=30) == 82
        assert time.monotonic() - started < 10


def test_what_was_announced_before_a_restart_does_not_end_the_new_workers(monkeypatch):
    """A launcher may keep its store over restarts."""
    store = dist.HashStore()
    PeerWatch(store, lambda: None).announce()
    left = []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    watch = PeerWatch(store, lambda: left.append("new"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    control = PeerWatch(store, lambda: left.append("old"))
    time.sleep(2 * peer_watch.INTERVAL)
    watch.close()
    control.close()
    assert set(left) == {"old"}


def test_a_store_that_has_left_ends_no_rank():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    left = []
    watch = PeerWatch(client, lambda: left.append(1))
    del store
    time.sleep(3 * peer_watch.INTERVAL)
    assert not left
    watch.announce()
