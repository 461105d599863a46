"""Runs of the command line in forks of one process that has imported torch and the program: 0.3 s instead of 2.5 s.

Importing is most of what a small run costs, and the tests start thousands. A fork is a process of its own that runs
`python -m trainapp`'s module from its first line; what it shares with others is how Python was started: the seed of
hashes, the environment at the time of the imports. Where those are what a test is about, it needs a real start. The
planner's process, which many runs start, is such a fork, too.

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
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Differ from test to test, and nothing reads them while it is imported.
_PER_TEST = ("PYTEST_CURRENT_TEST", "TRAINAPP_CACHE")
_PLANNER = "trainapp.planning.process"
_MODULES = ("hydra", "torch._dynamo", "torch._inductor", "trainapp.launch.launch", "trainapp.run.runner", _PLANNER)


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
        request = {"module": "trainapp", "arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
        return _ask(self._socket, request | {"own_session": own_session}, out.fileno(), err.fileno())

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


def _ask(to: socket.socket, request: Mapping[str, Any], out: int, err: int) -> Forked:
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as text:  # a packet has a limit, a file has none
        text.write(json.dumps(request).encode())
        text.flush()
        socket.send_fds(to, [b"run"], [text.fileno(), out, err, theirs.fileno()])
    return Forked(["python", "-m", request["module"], *request["arguments"]], ours)


def lasting(env: Mapping[str, str]) -> dict[str, str]:
    """What a process that has imported everything shares with those that it forks."""
    return {name: value for name, value in env.items() if name not in _PER_TEST}


def _fork_runs(requests: socket.socket) -> str:
    """Returns in each run the module to run, with its arguments, directory, environment and files in place; ends with
    the tests.
    """
    of_runs = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # by which a run asks for its planner
    of_runs.bind("")  # any free name
    of_runs.listen()
    while True:
        if of_runs in select.select([requests, of_runs], [], [])[0]:
            with of_runs.accept()[0] as connection:
                _, files, _, _ = socket.recv_fds(connection, 16, 4)
        else:
            _, files, _, _ = socket.recv_fds(requests, 16, 4)
            if not files:
                os._exit(0)
        if files and os.fork() == 0:
            requests.close()
            of_planners = of_runs.getsockname()
            of_runs.close()
            return _start(of_planners, *files)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):  # those that have told of their run's end
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _start(of_planners: bytes, text: int, out: int, err: int, answers: int) -> str:
    """Returns in the run, with its module; this process stays to tell how that ends."""
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
    sys.path[:1] = [request["cwd"], *request.get("path", [])]
    sys.argv = ["-m", *request["arguments"]]
    random.seed()
    if request["module"] != _PLANNER:
        _fork_planners(of_planners)
    return request["module"]


def _fork_planners(address: bytes) -> None:
    """Have this run's planners be forks."""
    from trainapp.planning import process

    def start(command: list[str], env: Mapping[str, str], stderr: IO[bytes], **others: Any) -> Any:
        if command[:3] != [sys.executable, "-m", _PLANNER]:
            return subprocess.Popen(command, env=env, stderr=stderr, **others)
        path = env["PYTHONPATH"].split(os.pathsep)
        request = {"module": _PLANNER, "arguments": command[3:], "cwd": os.getcwd(), "env": dict(env), "path": path}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, open(os.devnull, "wb") as nowhere:
            server.connect(address)
            return _ask(server, request | {"own_session": False}, nowhere.fileno(), stderr.fileno())

    own = types.ModuleType("subprocess")
    vars(own).update(vars(subprocess), Popen=start)
    process.subprocess = own


if __name__ == "__main__":
    for name in _MODULES:
        __import__(name)
    gc.freeze()  # not to be looked through in every run, and at its end
    module = _fork_runs(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
