"""Signals to the launcher, which it passes on to its workers."""

import contextlib
import logging
import multiprocessing
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trainapp.signals import ECHO, Interrupted, handled_by, pass_on


@dataclass
class ReceivedSignal:
    """The last signal that the launcher got while its workers ran."""

    number: int = 0  # 0: none so far
    received_at: float = 0.0  # by `time.monotonic()`


@contextlib.contextmanager
def signals_forwarded(received: ReceivedSignal) -> Iterator[None]:
    """Inside the block, a signal goes to the workers, which agree on the stop and return: torch's launcher would kill
    them after 30 s. A second one, or one without workers, raises Interrupted. Then the former handler gets the signal.

    Args:
        received: where the signal is noted.
    """
    pids_of_caller = {child.pid for child in multiprocessing.active_children()}

    def forward(number: int, frame: object) -> None:
        if received.number and time.monotonic() - received.received_at < ECHO:
            return  # the same one, sent to the process and to its group

        # The launcher need not say that workers have failed: those that end now were asked to.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        worker_pids = _running_children(except_for=pids_of_caller)
        for pid in worker_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        # The first one only asks: the workers save and return.
        is_first = not received.number
        received.received_at = time.monotonic()
        received.number = number
        if not is_first or not worker_pids:
            raise Interrupted(128 + number, number)

    try:
        with handled_by(forward) as former_handlers:
            yield
    finally:
        if received.number:
            pass_on(received.number, former_handlers[received.number])


def _running_children(except_for: Collection[int | None]) -> list[int]:
    pids = []
    for child in multiprocessing.active_children():
        if child.pid and child.pid not in except_for:
            pids.append(child.pid)
    return pids
