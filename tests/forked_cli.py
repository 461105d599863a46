"""Runs of the command line in forks of one process that has imported torch and the program: 0.3 s instead of 2.5 s.

Importing is most of what a small run costs, and the tests start thousands. A fork is a process of its own that runs
`python -m trainapp`'s module from its first line; what it shares with others is how Python was started: the seed of
hashes, the environment at the time of the imports. Where those are what a test is about, it needs a real start.

This file is also the program that forks. It answers a request (JSON and the files for stdin, stdout and stderr) with
the run's process id, then with its status, on a socket of the request's own.
"""

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# Differ from test to test, and nothing reads them while it is imported.
_PER_TEST = ("PYTEST_CURRENT_TEST", "TRAINAPP_CACHE")
_MODULES = ("hydra", "torch._dynamo", "torch._inductor", "trainapp.launch.launch", "trainapp.run.runner")


class Forks:
    """The process that forks, for one environment; ends with this one."""

    def __init__(self, env: Mapping[str, str]):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        atexit.register(self._end)

    def start(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], out: IO[str], err: IO[str], own_session: bool
    ) -> "Forked":
        """As `subprocess.Popen`. own_session: whether the run leads a session of its own."""
        ours, theirs = socket.socketpair()
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "own_session": own_session}
        with theirs, tempfile.TemporaryFile() as text:  # a packet has a limit, a file has none
            text.write(json.dumps(request).encode())
            text.flush()
            socket.send_fds(self._socket, [b"run"], [text.fileno(), out.fileno(), err.fileno(), theirs.fileno()])
        return Forked(["python", "-m", "trainapp", *arguments], ours)

    def run(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess:
        """As `subprocess.run` with captured text. Raises TimeoutExpired, after it has killed the run."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(arguments, cwd, env, out, err, own_session=False)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(process.args, status, out.read(), err.read())

    def _end(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


class Forked:
    """A run, with the part of `subprocess.Popen`'s interface that tests use."""

    def __init__(self, args: list[str], answers: socket.socket):
        self.args, self.returncode = args, None
        self._answers, self._text = answers, answers.makefile("rb", buffering=0)  # `select` sees no buffer
        self.pid = int(self._text.readline())

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._text.readline())
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status of a run that has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To a run that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """It ends soon."""
        self.send_signal(signal.SIGKILL)


def lasting(env: Mapping[str, str]) -> dict[str, str]:
    """What a process that has imported everything shares with those that it forks."""
    return {name: value for name, value in env.items() if name not in _PER_TEST}


def _fork_runs(requests: socket.socket) -> None:
    """Returns in each run, with its arguments, directory, environment and files in place; ends with the tests."""
    while True:
        _, files, _, _ = socket.recv_fds(requests, 16, 4)
        if not files:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return _start(*files)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):  # those that have told of their run's end
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _start(text: int, out: int, err: int, answers: int) -> None:
    """Returns in the run; this process stays to tell how that ends."""
    with os.fdopen(text, "rb") as file:
        file.seek(0)
        request = json.load(file)
    pid = os.fork()
    if pid:
        os.write(answers, f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(answers, f"{status}\n".encode())
        os._exit(0)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
    for file in (out, err, answers):
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["own_session"]:
        os.setsid()
    sys.path[0] = request["cwd"]
    sys.argv = ["-m", *request["arguments"]]
    random.seed()


if __name__ == "__main__":
    for name in _MODULES:
        __import__(name)
    gc.freeze()  # not to be looked through in every run, and at its end
    _fork_runs(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("trainapp", run_name="__main__", alter_sys=True)
