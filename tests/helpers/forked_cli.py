"""Runs of the command line in forks of a process that has imported torch and the program: 0.3 s instead of 2.5 s.

Importing is most of what a small run costs. A fork is a process of its own that runs `python -m trainapp`'s module from
its first line; what it shares with others is how Python was started: the seed of hashes, the environment at the time of
the imports. Where those are what a test is about, it needs a real start.
"""

import atexit
import functools
import gc
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

PROGRAM = (sys.executable, "-m", "trainapp")
_SOURCES = str(Path(__file__).resolve().parents[2] / "src")
_MODULES = ["__main__", "hydra", "torch._dynamo", "torch._inductor", "trainapp.launch.launch", "trainapp.run.runner"]
# Of each test, or set by what earlier tests have run in this process: nothing reads them during the imports.
_IGNORED = (
    *("PYTEST_CURRENT_TEST", "TRAINAPP_CACHE", "TRAINAPP_TEST_FAULTS", "WANDB_MODE", "TORCHINDUCTOR_CACHE_DIR"),
    "CUBLAS_WORKSPACE_CONFIG",
)
_CONTEXT = multiprocessing.get_context("forkserver")


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with one thread per run, updated with `env`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {})}


def _lasting(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _IGNORED}


@functools.cache
def _plain() -> dict[str, str]:
    """The environment of the server: as it is when the first test asks, since what tests import may add to it."""
    return _lasting(environment())


class Forked:
    """A run, with the part of `subprocess.Popen`'s interface that tests use. output: files for stdout and stderr.
    own_session: whether it leads a session of its own.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], output: tuple[str, str], own_session: bool
    ):
        self.args = ["python", "-m", "trainapp", *arguments]
        given = (list(arguments), str(cwd), dict(env), output, own_session)
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status of a run that has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired."""
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        """To a run that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """It ends soon."""
        self.send_signal(signal.SIGKILL)


def can_fork(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a fork does what this command would with this environment. Not where torch can use CUDA, which no fork
    can once its parent has looked for a device.
    """
    import torch

    if tuple(command) != PROGRAM or torch.version.cuda is not None:
        return False
    if _lasting(env) != _plain():
        return False
    _CONTEXT.set_forkserver_preload(_MODULES)
    with mock.patch.dict(os.environ, _plain(), clear=True):
        forkserver.ensure_running()
    return True


def _run(arguments: list[str], cwd: str, env: dict[str, str], output: tuple[str, str], own_session: bool) -> None:
    """The run, in its fork."""
    gc.freeze()  # not to be looked through in every run, and at its end
    for path, target in zip(output, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if own_session:
        os.setsid()
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), _SOURCES, *installed]
    multiprocessing.set_start_method(None, force=True)  # that of a plain process, for loader workers
    sys.argv = ["-m", *arguments]
    random.seed()
    atexit._clear()
    try:
        runpy.run_module("trainapp", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without
