"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 (a scheduler's warning): the first signal asks the run to stop, the second ends
it at once.

Python runs handlers in the main thread only, and not while it is inside C code (a backward, a collective), so two
signals may arrive as one call. A thread on the wakeup pipe, the listener, therefore announces what a signal will do,
and acts on the second.

An exception that a handler raises can be lost: Python discards one that leaves a `__del__` or the callback of a weak
reference, and a bare `except:` may drop it. While it propagates, and while a `finally` cleans up, the exception object
exists; a lost one is freed. The listener therefore repeats an interrupt whose exception was freed inside the block. It
also wakes a main thread whose wait the signal has not ended, because another thread got it.
"""

import contextlib
import functools
import logging
import math
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from trainapp.errors import UserError
from trainapp.units import parse_time

# Numbers, of SIGALRM and SIGVTALRM, that stand for `train.max_time` and a pause of a sweep; these are not sent.
TIME_IS_UP = 14
PAUSED = 26
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
REPEAT = signal.SIGURG  # from the listener to the main thread; ignored by default, so that a late one does no harm
REPEAT_AFTER = 0.1  # seconds between two looks at whether an interrupt was lost
ECHO = 1.0  # seconds in which a second one is the first again: sent to a process, then to its group, say
BEFORE_SLURM_ENDS = 120.0  # seconds, for the end of a step, a save and the trackers
TO_BE_CONTINUED = 75  # exit status, EX_TEMPFAIL of sysexits.h: stopped, nothing is lost, the same command continues
log = logging.getLogger(__name__)
# A forked child's signals are not its parent's: a terminal's Ctrl-C in a loader's worker is no second signal.
os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))


class Stopped(BaseException):
    """All ranks have agreed to stop, or a signal interrupts work while `StopRequest.interrupts`."""


class Interrupted(SystemExit):
    """A signal has ended the run, with this exit status. Ends a sweep, too."""

    def __init__(self, status: int, number: int = 0):  # pickled by a worker: the number as an attribute
        super().__init__(status)
        self.signal = number


class AtWork(NamedTuple):
    """What a signal interrupts; by default a run that is being built."""

    name: str = "preparation"
    lost: str = "nothing"  # if the process ends now
    is_saved: bool = False  # whether the same command then continues without a loss
    may_end: bool = True  # whether a signal ends the process at once, wherever it is


class StopRequest:
    """What asks a run to stop: a signal, its time, its sweep. A context manager around the run, in which `requested`
    is polled wherever the run can stop.

    Args:
        deadline: the `time.monotonic()` of `train.max_time`. No timer: the clock is read where signals are polled.

    Attributes:
        at_work: returns what a signal would interrupt now.
        signal: the first one's number, or None.
        agreed: the number for which all ranks have agreed to stop, or 0.
        interrupts: whether a signal raises Stopped in the main thread.
        facts: what result.json says of the signal, or None.
    """

    PATIENCE = 10.0  # seconds for the main thread to leave, which may be in C code or have lost `Interrupted`

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.at_work: Callable[[], AtWork] = AtWork
        self.signal: int | None = None
        self.agreed = 0
        self.interrupts = False
        self.facts: dict[str, Any] | None = None
        self._heard_at = 0.0  # time.monotonic() of the signal
        self._process = os.getpid()  # loader workers inherit the handler
        self._handlers = contextlib.ExitStack()
        self._is_passed_on = False  # to the previous handler
        self._interrupt: weakref.ref[BaseException] | None = None  # the last one raised in the main thread
        self._is_lost = False  # whether it was freed before the block has ended

    def __enter__(self) -> "StopRequest":
        self._previous = self._handlers.enter_context(handled_by(self._handle))
        if self._previous:
            self._handlers.enter_context(handled_by(self._repeat, (REPEAT,)))
            self._handlers.enter_context(_unraisable_stops_hidden())

            # Python writes the number of each signal into the pipe, which the listener reads.
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._outer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._interrupt = None
        self._is_lost = False  # nothing is repeated from here on
        self._handlers.close()

        # End the listener.
        if self._previous:
            signal.set_wakeup_fd(self._outer)
            os.write(self._writer, b"\0")  # ends the thread, once it has said what the signal does
            self._thread.join()
            os.close(self._writer)

        if self.signal and isinstance(error, Exception) and self.at_work().may_end:
            self.leave(self.signal)  # a peer that left closed its connection, or a library has wrapped `Interrupted`

    def requested(self) -> int:
        """Return the number of the signal that asks for a stop, TIME_IS_UP after the deadline, or 0."""
        if self.signal is None and time.monotonic() >= self.deadline:
            if self.facts is None:
                self._note(TIME_IS_UP)
                log.info("%s: the time is up during %s", named(TIME_IS_UP), self.at_work().name)
            return TIME_IS_UP
        return self.signal or 0

    def has_saved(self) -> None:
        """Note that the checkpoint that a stop has asked for is saved."""
        if self.facts is not None:  # else another rank has heard it
            self.facts["seconds"] = time.monotonic() - self._heard_at
            log.info("%s: saved %.1f s after it", named(self.agreed), self.facts["seconds"])

    def pause(self) -> None:
        """Pause the run, as its sweep asks. Call on all ranks, which then stop as after a signal."""
        self.agreed = PAUSED
        self._note(PAUSED)

    def leave(self, number: int) -> NoReturn:
        """Pass the signal to its previous handler, then end the run. Raises Interrupted."""
        raise self._ending(number)

    def _ending(self, number: int) -> Interrupted:
        """Pass the signal to its previous handler, once. Returns the exception that ends the run."""
        status = self._status(number)
        if not self._is_passed_on:
            self._is_passed_on = True  # submitit's would requeue the job again
            pass_on(number, self._previous.get(number))
        return Interrupted(status, number)

    def _status(self, number: int) -> int:
        """Return the exit status of a process that this signal ends."""
        if self.at_work().is_saved:
            return TO_BE_CONTINUED
        return 128 + number

    def _note(self, number: int) -> None:
        """Note the first signal; called by the handler and by the thread, in any order."""
        if self.facts is None:
            self._heard_at = time.monotonic()
            self.facts = {"signal": named(number), "during": self.at_work().name, "seconds": None}

    def _handle(self, number: int, frame: object) -> None:
        """Handle a signal; runs in the main thread, between two bytecodes."""
        if os.getpid() != self._process or self.signal is not None:
            return
        self._note(number)
        self.signal = number
        self._raise_interrupt()

    def _repeat(self, number: int, frame: object) -> None:
        """Raise the interrupt again if it is still lost; runs in the main thread, as `_handle`."""
        if os.getpid() == self._process and self._is_lost:
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        """Raise what ends the main thread's work: Interrupted, Stopped, or nothing if the work polls `requested`."""
        assert self.signal is not None, "without a signal"

        if self.at_work().may_end:
            error: BaseException = self._ending(self.signal)
        elif self.interrupts:
            error = Stopped()
        else:
            return

        # Raise it, and watch whether it is freed on its way.
        self._is_lost = False
        self._interrupt = weakref.ref(error, self._note_lost)
        try:
            raise error
        finally:
            del error  # this frame, which the traceback holds, must not keep it alive

    def _note_lost(self, reference: object) -> None:
        """Note that the interrupt has been freed: caught and dropped before it reached `__exit__`."""
        self._is_lost = reference is self._interrupt

    def _listen(self, reader: int) -> None:
        """Read the number of each signal that this process gets, and act on it; runs in the thread."""
        first = 0  # number of the first signal
        first_at = 0.0
        is_patient = True
        with open(reader, "rb", buffering=0) as pipe:
            while True:
                timeout = REPEAT_AFTER if first else None
                readable, _, _ = select.select([pipe], [], [], timeout)

                # Time has passed since the first signal: has the main thread reacted?
                if not readable:
                    self._repeat_if_needed()
                    if is_patient and time.monotonic() - first_at >= self.PATIENCE:
                        is_patient = False
                        if self.at_work().may_end:
                            self._exit(first, "the main thread does not return")
                    continue

                # A signal has come.
                number = pipe.read(1)[0]
                if number == 0:  # written by `__exit__`
                    return
                if number not in SIGNALS:
                    continue
                if not first:
                    first = number
                    first_at = time.monotonic()
                    self._announce(number)
                elif time.monotonic() - first_at >= ECHO:
                    self._exit(number, "a second signal")

    def _announce(self, number: int) -> None:
        """Say what the first signal will do."""
        self._note(number)
        at_work = self.at_work()
        if at_work.may_end:
            log.warning("%s: leaving; nothing is lost", named(number))
        else:
            log.warning("%s: finishing the %s; %s", named(number), at_work.name, how_to_quit(number))

    def _repeat_if_needed(self) -> None:
        """Wake the main thread, from the listener, if an interrupt has not reached it. A signal also ends a wait, such
        as `time.sleep`: then handlers run.
        """
        is_unhandled = self.signal is None
        has_not_arrived = self._is_lost or is_unhandled
        if has_not_arrived and (self.interrupts or self.at_work().may_end):
            main_thread = threading.main_thread().ident or 0
            signal.pthread_kill(main_thread, REPEAT)

    def _exit(self, number: int, reason: str) -> NoReturn:
        """End the process at once, from the thread."""
        log.warning("%s: %s: leaving at once; lost: %s", named(number), reason, self.at_work().lost)
        os._exit(self._status(number))


@contextlib.contextmanager
def handled_by(
    handler: Callable[[int, Any], None], numbers: tuple[signal.Signals, ...] = SIGNALS
) -> Iterator[dict[int, Any]]:
    """Handle the signals by `handler` inside the block. Yields the previous handlers; none outside of the main thread,
    which alone may set handlers.
    """
    previous_handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for to_handle in numbers:
            previous_handlers[int(to_handle)] = signal.signal(to_handle, handler)
    try:
        yield previous_handlers
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


@contextlib.contextmanager
def _unraisable_stops_hidden() -> Iterator[None]:
    """Print no "Exception ignored in" for a lost interrupt inside the block: it is repeated."""
    previous_hook = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, (Interrupted, Stopped)):
            previous_hook(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        if sys.unraisablehook is report:  # else the user's code has set its own
            sys.unraisablehook = previous_hook


def how_to_quit(number: int) -> str:
    """Return what ends the process at once after its first signal, for a message."""
    again = "press Ctrl-C again" if number == signal.SIGINT else "send the signal again"
    return f"{again} to quit immediately"


def named(number: int) -> str:
    """Return what asks for the stop: SIGTERM, train.max_time, or sweep.pruner."""
    if number == TIME_IS_UP:
        return "train.max_time"
    if number == PAUSED:
        return "sweep.pruner"
    return signal.Signals(number).name


def deadline_of(setting: str, value: str | None, started: float) -> float:
    """Return the `time.monotonic()` of a setting such as `11h50m`; inf without one.

    Args:
        setting: name of the setting, for messages.
        value: its value. "auto" is shortly before the Slurm job ends; raises UserError outside of one.
        started: the Unix time from which it counts.
    """
    if value is None:
        return math.inf
    if value == "auto":
        if "SLURM_JOB_END_TIME" not in os.environ:
            raise UserError(f"{setting}=auto: SLURM_JOB_END_TIME is not set; set a time such as 11h50m")
        end = float(os.environ["SLURM_JOB_END_TIME"]) - BEFORE_SLURM_ENDS
    else:
        end = started + (parse_time(value) or 0.0)
    return time.monotonic() + end - time.time()


def pass_on(number: int, handler: Any) -> None:
    """Pass a signal to the handler installed before the run's own: submitit's requeues the job."""
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)
