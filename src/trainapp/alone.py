"""One use of the process's generators, switches and import path at a time. Imports no torch."""

import contextlib
import threading
from collections.abc import Iterator

from trainapp.errors import UserError

_LOOK_EVERY = 0.05  # seconds
_held = threading.RLock()
_running: list[str] = []  # the run that is in progress


@contextlib.contextmanager
def running(function: str) -> Iterator[None]:
    """Around a run. Waits for what is `brief`. Raises UserError where another run is in progress, in any thread."""
    _acquire(function)
    try:
        if _running:  # a callback of that run has called
            raise _refused(function, _running[0])
        _running.append(function)
        try:
            yield
        finally:
            _running.pop()
    finally:
        _held.release()


@contextlib.contextmanager
def brief(function: str) -> Iterator[None]:
    """Around a call that takes seconds, such as loading a model: several wait for each other. A run may make such calls
    itself, as in a callback. Raises UserError where another thread's run is in progress.
    """
    _acquire(function)
    try:
        yield
    finally:
        _held.release()


def _acquire(function: str) -> None:
    while not _held.acquire(timeout=_LOOK_EVERY):
        for other in tuple(_running):  # it may end meanwhile
            raise _refused(function, other)


def _refused(function: str, other: str) -> UserError:
    return UserError(
        f"{function}: another run is in progress in this process ({other}), whose generators and limits it would "
        "share; wait until it ends, or use one process per run"
    )
