"""A run that a Python program starts: in its own process or, with several ranks, as a process of the command line.

Imports no torch before the process is prepared for it.
"""

import contextlib
import gc
import logging
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainapp.config.schema import Config
from trainapp.errors import TrainingStopped, UserError
from trainapp.launch import environment, launch
from trainapp.run import run_dir as directory
from trainapp.signals import StopRequest
from trainapp.tracking import terminal

if TYPE_CHECKING:
    from trainapp.run.result import Result

LOG = "trainapp.log"
_LOOK_EVERY = 0.1  # seconds: how soon a signal is passed on


def run(config: Config) -> "Result | None":
    """Train or predict as `config` says, which has an absolute `run_dir`. See `trainapp.train`. None where nothing was
    trained.
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
    try:
        if config.parallel.strategy == "single":
            _here(config)
        else:
            _as_command(config)
    except SystemExit as stopped:
        if stopped.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    from trainapp.run import result

    run_dir = Path(config.run_dir)
    ended = result.read(run_dir)
    return None if ended is None else result.Result(**vars(ended), run_dir=run_dir)


def _here(config: Config) -> None:
    """The run in this process."""
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={run_dir}: {error.strerror}; it must name a folder of yours") from None
    directory.acquire(run_dir)
    try:
        with as_before(config.memory.expandable_segments), _logged(run_dir):
            launch.run(config)
    finally:
        directory.release(run_dir)


def _as_command(config: Config) -> None:
    """The run as a process of its own, whose messages appear here. Signals are passed on to it."""
    said = b""
    with (
        subprocess.Popen(
            [sys.executable, *shlex.split(config.command)[1:]],
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # users' modules, too
            start_new_session=True,  # a terminal's Ctrl-C would reach it twice
        ) as process,
        StopRequest() as stop,
    ):
        assert process.stderr is not None
        passed_on = None
        while True:
            if stop.signal != passed_on:
                passed_on = stop.signal
                process.send_signal(stop.signal or 0)
            if select.select([process.stderr], [], [], _LOOK_EVERY)[0]:
                text = os.read(process.stderr.fileno(), 2**16)
                if not text:
                    break
                sys.stderr.write(text.decode(errors="replace"))
                said = (said + text)[-(2**16) :]
    _raise_for(process.returncode, said.decode(errors="replace"))


def _raise_for(exit_code: int, said: str) -> None:
    """What the exit code of the command line stands for. said: the end of its messages."""
    if exit_code == 0:
        return
    message = said.rpartition("\ntrainapp: ")[2] if "\ntrainapp: " in f"\n{said}" else ""
    message = "\n".join(line.strip() for line in message.removeprefix("trainapp: ").strip().splitlines())
    if message:
        raise (TrainingStopped if exit_code == TrainingStopped.exit_code else UserError)(message)
    if exit_code > 128:
        raise SystemExit(exit_code)
    raise TrainingStopped(f"the process that started the workers ended (exit code {exit_code}); see its output")


@contextlib.contextmanager
def as_before(expandable_segments: bool = False) -> Iterator[None]:
    """Restores the environment and the random generators of the caller's process; what else a run sets in torch is the
    next run's to set.
    """
    variables = dict(os.environ)
    # before torch is imported; other runs may follow in this process
    launch.prepare_process(expandable_segments, deterministic=True)
    import torch

    from trainapp.rng import preserved_rng

    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad(), preserved_rng(device):
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        gc.unfreeze()  # else the caller's objects would never be collected
        if torch.cuda.is_initialized():
            gc.collect()  # the run's model, which may be in a cycle
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _logged(run_dir: Path) -> Iterator[None]:
    """The run's log in its directory, and on the terminal unless the program has handlers of its own."""
    logger = logging.getLogger("trainapp")
    file = terminal.LogFile(run_dir / LOG)
    file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file, *([] if logger.hasHandlers() else [terminal.Handler(sys.stderr)])]
    level = logger.level
    logger.setLevel(level or logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
        file.close()
