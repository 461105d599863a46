"""Ctrl-C and SIGTERM: the first asks the run to stop after its step, the second leaves at once."""

import contextlib
import logging
import os
import signal
import threading

log = logging.getLogger(__name__)


class StopRequest:
    """`request.signal` is None until a signal asks for a stop. Use as a context manager around the run."""

    def __init__(self):
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        with contextlib.suppress(RuntimeError):  # the signal may have struck inside a write to the same stream
            log.warning("%s: finishing the step, then saving; again to leave at once", signal.Signals(number).name)
