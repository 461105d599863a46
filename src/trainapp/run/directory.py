"""The directory of a run: one run at a time, and one experiment. Imports no torch.

The lock is the kernel's (POSIX) on the file `run.lock`: it is released when its process ends, however that dies, and
forked loader workers do not inherit it, so no stale lock blocks the next run. The file's content is only for messages.

Nothing else in the holding process may open the file: closing any descriptor of it would drop the lock.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from trainapp.config import resume_rules
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.report.run_files import newest_manifest

LOCK = "run.lock"
# A variable, set where the run goes on in place of a broken process: whether that run has saved a checkpoint.
REPLACES_A_PROCESS = "TRAINAPP_REPLACES_A_PROCESS"
# The same, set by a launcher that starts workers in place of failed ones.
REPLACES_WORKERS = "TRAINAPP_REPLACES_WORKERS"
HAS_SAVED = "has saved"
HAS_NOT_SAVED = "has not saved"
IN_USE = "another run is using this directory"  # in the message of `acquire`
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLL = 0.05  # seconds
log = logging.getLogger(__name__)

_held: dict[Path, int] = {}  # the file descriptors of this process's locks


def has_restarted() -> bool:
    """Return whether a launcher has restarted this run's workers, or its only process has replaced itself."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or REPLACES_A_PROCESS in os.environ


def may_have_saved() -> bool:
    """Return whether the newest checkpoint in the directory may be this run's, saved before a restart. Workers of
    torchrun do not know.
    """
    before = (os.environ.get(REPLACES_A_PROCESS), os.environ.get(REPLACES_WORKERS))
    return has_restarted() and HAS_NOT_SAVED not in before


def acquire(run_dir: Path, patience: float = 0.0) -> None:
    """Lock the directory for this process, until `release` or its end. No effect if it holds the lock already.

    Raises UserError if another run uses the directory (with the host and id of its process), or if the lock cannot be
    written.

    Args:
        run_dir: the directory.
        patience: seconds to wait for a process that is about to end.
    """
    path = run_dir.resolve() / LOCK
    if path in _held:
        return

    until = time.monotonic() + patience
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        while (descriptor := _locked(path)) is None:
            if time.monotonic() >= until:
                raise UserError(
                    f"hydra.run.dir={run_dir}: {IN_USE}{_holder(path)}; wait until it has "
                    "ended, stop it, or choose another directory"
                )
            time.sleep(_POLL)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            log.warning("%s: its file system has no locks; make sure that no other run uses it", run_dir)
            return
        reason = f"{error.filename or path}: {error.strerror}"
        raise UserError(f"{reason}; hydra.run.dir or hydra.sweep.dir must name a folder you can write to") from None

    # Who holds it, for the message of another run.
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = f" (process {os.getpid()} on host {socket.gethostname()}, since {started})"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder.encode(), 0)
    _held[path] = descriptor


def is_in_use(run_dir: Path) -> bool:
    """Return whether a run holds the lock of an existing directory."""
    if run_dir.resolve() / LOCK in _held:
        return True
    try:
        acquire(run_dir)
    except UserError:
        return True
    release(run_dir)
    return False


def release(run_dir: Path) -> None:
    """Release the lock. No effect without it."""
    path = run_dir.resolve() / LOCK
    descriptor = _held.pop(path, None)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Return the descriptor of the locked file; None while another process holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):  # POSIX allows either
                return None
            raise

        # Between opening and locking, the last holder may have removed the file: a lock on it would lock nobody out.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def require_same_experiment(config: Config) -> None:
    """Raise UserError, with all differences, if the directory has checkpoints of a run with other settings that affect
    the result. Training only: evaluation and export do not write a run's files.
    """
    if not config.activity.trains:
        return
    run_dir = Path(config.run_dir)
    saved_config = newest_manifest(run_dir).get("config")
    if saved_config is None:
        return

    differences = []
    for change in resume_rules.changes(saved_config, config.to_dict()):
        takes_saved_seed = change.name == "train.seed" and not config.chooses("train.seed")
        if change.is_another_experiment and not takes_saved_seed:
            differences.append(change)
    if differences:
        listed = "\n".join(f"  {change}" for change in differences)
        raise UserError(
            f"hydra.run.dir={run_dir}: this directory belongs to a run whose settings give another result:\n"
            f"{listed}\n"
            "choose another directory (of a sweep, hydra.sweep.dir); to continue that run there with the new settings, "
            f"also set checkpointing.resume={run_dir}, or model.init_from={run_dir} to take its weights alone"
        )
