"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 (a scheduler's warning): the first signal asks the run to stop after its step,
the second ends it at once.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from typing import Any

log = logging.getLogger(__name__)


class StopRequest:
    """`request.signal` is None until a signal asks for a stop. Use as a context manager around the run."""

    NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
    ECHO = 1.0  # seconds; a terminal and the launcher both send the same Ctrl-C to a worker

    def __init__(self) -> None:
        self._at = 0.0
        self._process = os.getpid()  # loader workers inherit the handler
        self.signal: int | None = None
        self.agreed = 0  # the signal for which all ranks have agreed to stop
        self._workers = "TORCHELASTIC_RUN_ID" in os.environ
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def pass_on(self, number: int) -> None:
        """Call after the run has saved and ended for a signal: see `pass_on`."""
        pass_on(number, self._previous.get(number))

    def _handle(self, number: int, frame: object) -> None:
        if self.signal is not None:
            if self._workers and time.monotonic() - self._at < self.ECHO:
                return
            os._exit(128 + number)
        self.signal, self._at = number, time.monotonic()
        if os.getpid() != self._process:
            return
        with contextlib.suppress(RuntimeError):  # the signal may have arrived during a write to the same stream
            log.warning("%s: finishing the step, then saving; again to leave at once", signal.Signals(number).name)


def pass_on(number: int, handler: Any) -> None:
    """Pass a signal to the handler installed before the run's own: submitit's requeues the job."""
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)
