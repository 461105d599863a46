"""One run at a time; short calls wait for each other."""

import threading
import time

import pytest

from trainapp import alone
from trainapp.errors import UserError


def test_a_run_is_refused_beside_or_within_another_one():
    message = r"two: another run is in progress .*\(one\)"
    with alone.running("one"), pytest.raises(UserError, match=message), alone.running("two"):
        raise AssertionError("entered")
    with alone.running("two"):
        pass


def test_a_run_may_make_short_calls_itself():
    with alone.running("one"), alone.brief("load"), alone.brief("load"):
        pass


def test_short_calls_wait_for_each_other_and_runs_for_them():
    order, inside = [], threading.Event()

    def first():
        with alone.brief("load"):
            inside.set()
            time.sleep(0.2)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with alone.brief("load"):
        order.append("second")
    with alone.running("train"):
        order.append("run")
    thread.join()
    assert order == ["first", "second", "run"]
