"""A run that a Python program starts: in its own process or, with several workers, below another one. Imports no torch.

Workers import the program that starts them, which would run it once more: `python -m trainapp.launch.from_python` is a
process for them that has nothing of the caller's.
"""

import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, UserError
from trainapp.launch import borrowed, environment, launch
from trainapp.run import experiment, lock
from trainapp.signals import StopRequest

if TYPE_CHECKING:
    from trainapp.run.result import Result, RunResult

_LENGTH = struct.Struct("!Q")
_LOOK_EVERY = 0.1  # seconds: how soon a signal is passed on
log = logging.getLogger(__name__)


def run(config: Config) -> "Result":
    """Train or predict as `config` says, which has an absolute `run_dir`. See `trainapp.train`. Call inside
    `alone.running`.
    """
    function = f"trainapp.{config.mode}"
    if environment.is_one_of_many_ranks():
        raise UserError(
            f"{function}: torchrun, srun or submitit started this process as one of several, which would each "
            "run it; start `python -m trainapp` with it, or set parallel.devices=N in a program that is started once"
        )
    if config.parallel.nodes > 1:
        raise UserError(
            f"{function}: parallel.nodes={config.parallel.nodes} is started on each node by its command line, "
            f"{config.command}"
        )
    run_dir = Path(config.run_dir)
    before = _written_at(run_dir)
    try:
        with borrowed.borrowed(config.memory.expandable_segments):
            ended = _here(config) if config.parallel.strategy == "single" else _below(config)
    except SystemExit as stopped:
        if stopped.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    from trainapp.run import result

    if before is not None and _written_at(run_dir) == before:  # the run had already finished, and trained nothing
        ended = result.read(run_dir) or ended
    return result.Result(**vars(ended), run_dir=run_dir)


def _written_at(run_dir: Path) -> int | None:
    path = run_dir / experiment.RESULT
    return path.stat().st_mtime_ns if path.exists() else None


def _here(config: Config) -> "RunResult":
    """The run in this process."""
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={run_dir}: {error.strerror}; it must name a folder of yours") from None
    lock.acquire(run_dir)
    try:
        with borrowed.logged(config):
            return launch.run(config)
    finally:
        lock.release(run_dir)


def _below(config: Config) -> "RunResult":
    """The run in a process that starts the workers. Signals are passed on to it, and it ends with this process."""
    reads, writes = os.pipe()
    paths = os.pathsep.join(filter(None, sys.path))  # users' modules, too
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(writes)],
            stdin=subprocess.PIPE,
            pass_fds=[writes],
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # a terminal's Ctrl-C would reach it twice
        )
    finally:
        os.close(writes)
    assert process.stdin is not None
    request = pickle.dumps(config)
    with open(reads, "rb") as answer, process.stdin, StopRequest() as stop:
        process.stdin.write(_LENGTH.pack(len(request)) + request)
        process.stdin.flush()
        passed_on, content = None, list[bytes]()
        # At the same time: a pipe holds 64 KiB, and the child would wait with a longer answer.
        reader = threading.Thread(target=lambda: content.append(answer.read()), daemon=True)
        reader.start()
        while process.poll() is None:
            if stop.signal != passed_on:
                passed_on = stop.signal
                process.send_signal(stop.signal or 0)
            try:
                process.wait(_LOOK_EVERY)
            except subprocess.TimeoutExpired:
                continue
        reader.join()
        return _answer(content[0], process.returncode)


def _answer(content: bytes, exit_code: int) -> "RunResult":
    if not content:
        if exit_code > 128:
            raise SystemExit(exit_code)
        raise TrainingStopped(f"the process that started the workers ended (exit code {exit_code}); see its output")
    result, error, code = pickle.loads(content)
    if error is not None:
        raise (TrainingStopped if code == TrainingStopped.exit_code else UserError)(error)
    ended: RunResult = result
    return ended


def main(writes: int) -> None:
    """The process of `_below`: reads a configuration from its input, and writes how the run has ended."""
    (length,) = _LENGTH.unpack(_read(_LENGTH.size))
    config = pickle.loads(_read(length))
    threading.Thread(target=_end_with_caller, daemon=True).start()
    answer: tuple[Any, str | None, int]
    try:
        answer = (_here(config), None, 0)
    except UserError as error:
        answer = (None, str(error), error.exit_code)
    with open(writes, "wb") as file:
        file.write(pickle.dumps(answer))


def _read(length: int) -> bytes:
    """From file descriptor 0 itself: a thread that waits in `sys.stdin` would abort the interpreter's end."""
    content = b""
    while len(content) < length:
        more = os.read(0, length - len(content))
        if not more:
            sys.exit(1)
        content += more
    return content


def _end_with_caller() -> None:
    os.read(0, 1)  # returns when the caller has closed its end, or has died
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(int(sys.argv[1]))
