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
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# Differ from test to test, and nothing reads them while it is imported.
_PER_TEST = ("PYTEST_CURRENT_TEST", "TRAINAPP_CACHE")
_MODULES = ("hydra", "torch._dynamo", "torch._inductor", "trainapp.launch.launch", "trainapp.run.runner")


class Forks:
    """The process that forks, for one environment; ends with this one."""

    def __init__(self, env: Mapping[str, str]):
        self._env = _lasting(env)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        atexit.register(self._end)

    def serve(self, env: Mapping[str, str]) -> bool:
        """Whether a run with this environment would be what it is when started by itself."""
        return _lasting(env) == self._env and self._process.poll() is None

    def run(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess:
        """As `subprocess.run` with captured text. Raises TimeoutExpired, after it has killed the run."""
        command = ["python", "-m", "trainapp", *arguments]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            ours, theirs = socket.socketpair()
            request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}).encode()
            with ours, theirs, tempfile.TemporaryFile() as text:  # a packet has a limit, a file has none
                text.write(request)
                text.flush()
                files = [text.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
                socket.send_fds(self._socket, [b"run"], files)
                theirs.close()
                answers = ours.makefile()
                pid = int(answers.readline())
                ours.settimeout(timeout)
                try:
                    status = int(answers.readline())
                except TimeoutError:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(command, timeout) from None
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, status, out.read(), err.read())

    def _end(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


def _lasting(env: Mapping[str, str]) -> dict[str, str]:
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
    sys.path[0] = request["cwd"]
    sys.argv = ["-m", *request["arguments"]]
    random.seed()


if __name__ == "__main__":
    for name in _MODULES:
        __import__(name)
    gc.freeze()  # not to be looked through in every run, and at its end
    _fork_runs(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("trainapp", run_name="__main__", alter_sys=True)
