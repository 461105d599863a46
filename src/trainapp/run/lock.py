"""One run per directory: a lock on a file in it, which names the process that holds it. Imports no torch.

The kernel's lock on the file (POSIX, by byte range) is what counts: it ends with its process, however that dies, so
that nothing stale can block the next run and no reused process id can be mistaken. NFS carries it between hosts (NFSv4
itself, NFSv3 through lockd). Forked children do not inherit it, unlike flock's, so that a loader's worker that
outlives a killed run does not keep its lock. What the file says is for the message, and decides only where the file
system has no locks.

Nothing else in the holding process may open the file and close it again, not even to read it: closing any of a
process's descriptors of a file drops all of its POSIX locks on it.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainapp.errors import UserError

NAME = "run.lock"
_RUN, _WORKER, _UNUSED = 0, 1, 2  # the bytes that the run's process and its rank 0, if that is another one, hold
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_POLL = 0.05  # seconds
_ORPHANS = 20.0  # seconds that the workers of a killed launcher may take to save and end

_held: dict[Path, int] = {}  # the file descriptors of this process's locks


def acquire(run_dir: Path, shared_as: str | None = None, patience: float = 0.0) -> None:
    """Lock the directory for this process, until `release` or its end. No effect if it holds the lock already.

    shared_as: a name under which several launchers, one on each node, are the same run; the first holds the lock.
    patience: seconds to wait for a process that is about to end.
    Raises UserError, with the host and the id of the other process, when another run uses the directory, and for a lock
    file that this process may not write. A directory without one that cannot be written to is left to the first write.
    """
    path = run_dir.resolve() / NAME
    if path in _held:
        return
    until = time.monotonic() + patience
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = _try(path)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        if os.path.lexists(path):
            raise _not_ours(run_dir) from None
        return
    while descriptor is None:
        holder = _holder(path)
        if shared_as is not None and holder.get("run_id") == shared_as:
            return
        if time.monotonic() >= until and (has_locks := _has_locks(path)) is not None:
            raise _in_use(run_dir, holder, has_locks)
        time.sleep(_POLL)
        with contextlib.suppress(FileNotFoundError):  # the directory is gone too: again
            run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = _try(path)
    _held[path] = descriptor
    if not _wait_for(descriptor, _WORKER, _ORPHANS):
        holder = _holder(path)
        release(run_dir)
        raise _in_use(run_dir, holder)
    _unlock(descriptor, _WORKER)
    own = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time(), "run_id": shared_as}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(own).encode(), 0)


def is_held(run_dir: Path) -> bool:
    """Whether this process holds the directory's lock."""
    return run_dir.resolve() / NAME in _held


def release(run_dir: Path) -> None:
    """Give the directory up. No effect without the lock."""
    path = run_dir.resolve() / NAME
    descriptor = _held.pop(path, None)
    if descriptor is None:
        return
    if _lock(descriptor, _WORKER) is not False:  # else its next holder must find the same file
        path.unlink(missing_ok=True)
    os.close(descriptor)


@contextlib.contextmanager
def held_by_worker(run_dir: Path) -> Iterator[None]:
    """Hold the lock of rank 0 inside the block, in a process that the holder of the run's lock has started.

    Should that one be killed, the next run waits until this process has ended. Waits for the rank 0 before it.
    """
    descriptor = os.open(run_dir / NAME, os.O_RDWR | os.O_CREAT)
    try:
        _wait_for(descriptor, _WORKER, _ORPHANS)
        yield
    finally:
        os.close(descriptor)


def _try(path: Path) -> int | None:
    """The descriptor of the locked file; None when another process holds its lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        is_locked = _lock(descriptor, _RUN)
        if is_locked is None:
            is_locked = not _is_alive(_holder(path))
        if is_locked and _is_file(descriptor, path):
            return descriptor
        os.close(descriptor)
        if not is_locked:
            return None


def _lock(descriptor: int, byte: int) -> bool | None:
    """Whether this process has the lock now; None where the file system has none."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _unlock(descriptor: int, byte: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)


def _has_locks(path: Path) -> bool | None:
    """Whether the file system has locks; None without the file: its last holder has removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return _lock(descriptor, _UNUSED) is not None
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, byte: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while _lock(descriptor, byte) is False:
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL)
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether `path` is still the opened file: its last holder removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> dict[str, Any]:
    """What the file says of its holder, who writes it just after locking; empty if nothing can be read."""
    for _ in range(10):
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text())
            if isinstance(found, dict) and {"host", "pid", "started"} <= found.keys():
                return found
        time.sleep(_POLL)
    return {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Without locks: whether the process that the file names may still run. One on another host may."""
    import psutil  # here, since hardly any file system is without locks

    if not holder or holder["host"] != socket.gethostname():
        return bool(holder)
    try:
        return psutil.Process(holder["pid"]).create_time() <= holder["started"]  # a reused id is younger
    except (psutil.Error, TypeError, ValueError):
        return False


def _in_use(run_dir: Path, holder: dict[str, Any], has_locks: bool = True) -> UserError:
    who = "another process"
    if holder:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["started"]))
        who = f"process {holder['pid']} on host {holder['host']}, since {since}"
    message = (
        f"hydra.run.dir={run_dir}: another run is using this directory ({who}); wait until it has ended, stop it, or "
        "choose another directory"
    )
    if not has_locks:
        message += f". This file system has no locks: if no such process exists, delete {run_dir / NAME}"
    return UserError(message)


def _not_ours(run_dir: Path) -> UserError:
    path = run_dir / NAME
    try:
        owner = path.owner()
    except (OSError, KeyError):
        owner = "another user"
    return UserError(
        f"hydra.run.dir={run_dir}: {path} (of {owner}) cannot be opened for writing, so that it is unknown whether "
        "another run is using this directory; choose another one or, if no run is using it, delete that file"
    )
