"""Persistent worker processes: importing torch costs more than a tiny run. Each cell joins a new process group.

If a cell exceeds its time limit or loses a worker, its processes are killed; the next cell gets new ones.
"""

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked_cli
import psutil


class CellFailed(AssertionError):
    """The report of each rank of a failed cell."""


class Hang(CellFailed):
    """A cell exceeded its time limit."""


class Pool:
    """`pool.run(world, function, *args)` calls `function(rank, *args)` on `world` processes and returns the results."""

    def __init__(self):
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
        """The results by rank. Raises CellFailed for an error on any rank, Hang past `limit` seconds."""
        while len(self._workers) < world:
            self._workers.append(_start(len(self._workers)))
        with tempfile.TemporaryDirectory() as folder:
            traces = Path(folder)
            names = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            for rank, (_, pipe) in enumerate(self._workers[:world]):
                pipe.send((names | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, str(traces), function, args))
            answers = self._collect(world, time.monotonic() + limit)
            if all(kind == "result" for kind, _ in answers):
                return [value for _, value in answers]
            if any(kind == "hang" for kind, _ in answers):
                answers = [(kind, value or self._stack(rank, traces)) for rank, (kind, value) in enumerate(answers)]
        self.close()
        text = _explain(answers)
        if any(kind == "hang" for kind, _ in answers):
            raise Hang(f"not done after {limit} s\n{text}")
        raise CellFailed(text)

    def _collect(self, world: int, until: float) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any] | None] = [None] * world
        while None in answers and time.monotonic() < until:
            for rank, (process, pipe) in enumerate(self._workers[:world]):
                if answers[rank] is None:
                    try:
                        if pipe.poll(0.005):
                            answers[rank] = pipe.recv()
                            if answers[rank][0] != "result":  # the others may wait for it until their timeout
                                until = min(until, time.monotonic() + 5)
                    except (EOFError, ConnectionError):
                        process.join(5)
                        answers[rank] = ("ended", f"exit code {process.exitcode}")
        return [answer or ("hang", "") for answer in answers]

    def _stack(self, rank: int, traces: Path) -> str:
        """The worker's current stack, which it writes on SIGQUIT: a run handles the other signals itself."""
        process = self._workers[rank][0]
        import signal

        os.kill(process.pid, signal.SIGQUIT)
        time.sleep(0.3)
        path = traces / str(rank)
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """Kill all workers and their child processes."""
        for process, pipe in self._workers:
            family = [process, *_children(process.pid)]
            for member in family:
                member.kill()
            process.join()
            pipe.close()
        self._workers.clear()


def _explain(answers: list[tuple[str, Any]]) -> str:
    """In full for the ranks that failed on their own; one line for those that only lost a peer."""
    lines = []
    for rank, (kind, value) in enumerate(answers):
        text = "" if kind == "result" else str(value).strip()
        if "gloo" in text.rpartition("\n")[2] and any(k != "result" and "gloo" not in str(v) for k, v in answers):
            text = text.rpartition("\n")[2][:200]
        lines.append(f"--- rank {rank}: {kind}\n{text}")
    return "\n".join(lines)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _start(rank: int) -> tuple[Any, Connection]:
    """Start a worker: rank 0 as a new process, the others as forks of one that has imported torch, where they can.

    So rank 0 hashes strings with another seed than the others, as in the real launcher: ranks that walk a set of names
    in different orders meet here, too.
    """
    environment = forked_cli.environment()
    method = "forkserver" if rank > 0 and forked_cli.can_fork(forked_cli.PROGRAM, environment) else "spawn"
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, rank, dict(os.environ)), name=f"rank {rank}")
    process.start()
    there.close()
    return process, here


def _serve(pipe: Connection, rank: int, environment: dict[str, str]) -> None:
    import faulthandler
    import gc
    import signal

    import torch

    os.environ.clear()  # a fork has that of the process it is forked from
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            names, traces, function, args = pipe.recv()
        except EOFError:
            return
        os.environ.update(names)
        with open(Path(traces) / str(rank), "w") as file:
            faulthandler.register(signal.SIGQUIT, file, all_threads=False)
            try:
                answer = ("result", function(rank, *args))
            except BaseException:
                answer = ("error", traceback.format_exc())
            faulthandler.unregister(signal.SIGQUIT)
        gc.collect()  # otherwise each cell's groups stay, with threads that wake 100 times a second: 1,900 of them
        if not gc.get_freeze_count():
            gc.freeze()  # imported objects need not be scanned again
        pipe.send(answer)
        if answer[0] == "error":  # its process group cannot be reused
            os._exit(1)


def free_port() -> int:
    """An unused port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
