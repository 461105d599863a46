"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 (a scheduler's warning): the first signal asks the run to stop, the second ends
it at once.

Python calls a handler in the main thread only, and not while C code holds it (a backward, a collective), so that two
signals may become one call. A thread on the wakeup pipe therefore says what a signal will do, and obeys the second.
"""

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

TIME_IS_UP = 14  # the number, of SIGALRM, that stands for `train.max_time` among signals; none is sent
TO_BE_CONTINUED = 75  # exit status, EX_TEMPFAIL of sysexits.h: stopped, nothing is lost, the same command continues
log = logging.getLogger(__name__)


class Stopped(BaseException):
    """All ranks have agreed to stop, or a signal interrupts the block of `StopRequest.raised`."""


class Interrupted(SystemExit):
    """A signal has ended the run, with this exit status. Ends a sweep, too."""

    def __init__(self, number: int, status: int):
        super().__init__(status)
        self.signal = number

    def __reduce__(self) -> Any:  # pickled by a worker
        return Interrupted, (self.signal, self.code)


class Preparation:
    """At work while a run is built: a signal ends it at once. is_saved: whether its checkpoint has been found."""

    def __init__(self, is_saved: bool = False):
        self.is_saved, self.has_nothing_to_lose = is_saved, True
        self.work, self.lost = "preparation", "nothing"


class StopRequest:
    """Use as a context manager around the run. `heard` is polled wherever the run can stop.

    Attributes: `session`, what is at work. `signal`: the first one's number, or None. `agreed`: the number for which
    all ranks have agreed to stop, or 0. `during`: what the signal interrupted. `saved_after`: seconds from the signal
    to the checkpoint.

    deadline: the `time.monotonic()` of `train.max_time`. No timer: the clock is read where signals are polled.
    """

    NAMES = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
    ECHO = 1.0  # seconds; a terminal and the launcher both send the same Ctrl-C to a worker
    PATIENCE = 10.0  # seconds for the main thread to leave, which may be in C code or have lost `Interrupted`
    _listeners = 0  # threads in this process

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.session: Any = Preparation()
        self.signal: int | None = None
        self.agreed = 0
        self.during: str | None = None
        self.saved_after: float | None = None
        self._at = 0.0
        self._raises = False
        self._process = os.getpid()  # loader workers inherit the handler
        self._workers = "TORCHELASTIC_RUN_ID" in os.environ
        self._previous: dict[int, Any] = {}
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
                self._restore.callback(signal.signal, number, self._previous[number])
            self._restore.enter_context(self._heard_in_a_thread())
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._restore.close()
        if self.signal and isinstance(error, Exception) and self.session.has_nothing_to_lose:
            self.leave(self.signal)  # a peer that left closed its connection, or a library has wrapped `Interrupted`

    def heard(self) -> int:
        """The number of the signal that asks for a stop, TIME_IS_UP after the deadline, or 0."""
        if self.signal is None and time.monotonic() >= self.deadline:
            if not self._at:
                self._note()
                log.info("%s: the time is up during %s", named(TIME_IS_UP), self.during)
            return TIME_IS_UP
        return self.signal or 0

    @contextlib.contextmanager
    def at_work(self, session: Any) -> Iterator[None]:
        """Inside the block, the session honours signals where nothing is lost by it."""
        self.session = session
        try:
            yield
        finally:
            self.session = Preparation(session.is_saved)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Around work of this rank alone: a signal interrupts it, and the block ends without an error. The caller's
        ranks then agree on the stop.
        """
        self._raises = not self.heard()
        try:
            yield
        except (Stopped, Exception):  # a library may have wrapped it
            if self._raises or not self.heard():
                raise
        finally:
            self._raises = False

    @property
    def facts(self) -> dict[str, Any] | None:
        """The signal that this process has heard, for result.json."""
        if not self._at:
            return None
        return {"signal": named(self.signal or TIME_IS_UP), "during": self.during, "seconds": self.saved_after}

    def has_saved(self) -> None:
        """Call after a checkpoint that a stop has asked for."""
        if self.saved_after is None and self._at:
            self.saved_after = time.monotonic() - self._at
            log.info("%s: saved %.1f s after it", named(self.agreed), self.saved_after)

    def leave(self, number: int) -> NoReturn:
        """Pass the signal to its previous handler, then end the run. Raises Interrupted."""
        status = self._status(number)
        pass_on(number, self._previous.get(number))
        raise Interrupted(number, status)

    def _status(self, number: int) -> int:
        return TO_BE_CONTINUED if self.session.is_saved else 128 + number

    def _note(self) -> None:
        """Called by the handler or by the thread, which may be first."""
        if not self._at:
            self.during, self._at = self.session.work, time.monotonic()

    def _handle(self, number: int, frame: object) -> None:
        """In the main thread, between two lines of Python."""
        if os.getpid() != self._process or self.signal is not None:
            return
        self._note()
        self.signal = number
        if self.session.has_nothing_to_lose:
            self.leave(number)
        if self._raises:
            self._raises = False
            raise Stopped

    @contextlib.contextmanager
    def _heard_in_a_thread(self) -> Iterator[None]:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        thread.start()
        StopRequest._listeners += 1
        try:
            yield
        finally:
            StopRequest._listeners -= 1
            signal.set_wakeup_fd(before)
            os.write(writer, b"\0")  # ends the thread
            thread.join()
            os.close(writer)
            os.close(reader)

    def _listen(self, reader: int) -> None:
        """The thread: reads the number of each signal that this process gets."""
        first, leaves_by = 0, math.inf
        while True:
            wait = None if leaves_by == math.inf else max(0.0, leaves_by - time.monotonic())
            if not select.select([reader], [], [], wait)[0]:
                leaves_by = math.inf
                if self.session.has_nothing_to_lose:
                    self._exit(first, "the main thread does not return")
                continue
            number = os.read(reader, 1)[0]
            if number == 0:
                return
            if number in self.SIGNALS and not first:
                first = number
                self._note()
                leaves_by = self._at + self.PATIENCE
                leaves, then = self.session.has_nothing_to_lose, f"finishing the {self.during}; again to leave at once"
                log.warning("%s: %s", signal.Signals(number).name, "leaving; nothing is lost" if leaves else then)
            elif number in self.SIGNALS and not (self._workers and time.monotonic() - self._at < self.ECHO):
                self._exit(number, "a second signal")

    def _exit(self, number: int, why: str) -> NoReturn:
        """End the process from the thread."""
        log.warning("%s: %s: leaving at once; lost: %s", signal.Signals(number).name, why, self.session.lost)
        os._exit(self._status(number))


def named(number: int) -> str:
    """SIGTERM, or train.max_time."""
    return "train.max_time" if number == TIME_IS_UP else signal.Signals(number).name


def pass_on(number: int, handler: Any) -> None:
    """Pass a signal to the handler installed before the run's own: submitit's requeues the job."""
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)


def _forget_pipe() -> None:
    """A forked child's signals are not its parent's: a terminal's Ctrl-C in a loader's worker is no second signal."""
    if StopRequest._listeners:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_pipe)
