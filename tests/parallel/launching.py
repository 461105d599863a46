"""Runs the real command line on several ranks, watches its processes, and kills them all at the time limit."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import runs
from forked_cli import Forked, can_fork
from helpers import environment

from .cell import GPT, TINY

LIMIT = 180.0
LAUNCHED = (
    *TINY,
    *GPT,
    "parallel.devices=2",
    "parallel.timeout=30",
    "train.max_steps=6",
    "every.save=2",
    "checkpointing=standard",
    "checkpointing.keep_last=9",
    "batch.eval_micro_size=20",
    "every.eval=2",  # with the saves: the best evaluation is always saved
)
SABOTAGED = ("user_packages=[parallel]", "data._target_=parallel.saboteur.MaskedTokens")


@dataclass
class Ended:
    """How a command ended; `orphans` are processes of its session that outlived it."""

    code: int
    text: str
    seconds: float
    orphans: list[str]


class Launched:
    """A command in a separate session. Use as a context manager: no process of it is left on exit."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None):
        self.output = cwd / f"output_{time.monotonic_ns()}.txt"
        self.output.touch()
        self.started = time.monotonic()
        variables = environment(env)
        if can_fork(command[:3], variables):
            output = (str(self.output), str(self.output))
            self.process = Forked(command[3:], cwd, variables, output, own_session=True)
        else:
            with self.output.open("w") as file:
                self.process = subprocess.Popen(
                    command, cwd=cwd, env=variables, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.session():
            member.kill()
        self.process.kill()
        self.process.wait()

    def session(self) -> list[psutil.Process]:
        """Return all processes of the session except the command itself, also those whose parent has exited."""
        members = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.pid != self.process.pid and os.getsid(process.pid) == self.process.pid:
                    members.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return members

    def workers(self) -> dict[int, int]:
        """Return the process id of each rank: the launcher starts them in rank order."""
        children = psutil.Process(self.process.pid).children()
        workers = [child for child in children if any("spawn_main" in word for word in child.cmdline())]
        workers.sort(key=psutil.Process.create_time)
        return {rank: worker.pid for rank, worker in enumerate(workers)}

    def wait_for(self, path: Path, limit: float = LIMIT) -> None:
        """Wait until a file exists."""
        until = time.monotonic() + limit
        while not path.exists():
            assert time.monotonic() < until, f"no {path.name} after {limit} s\n{self.text()}"
            assert self.process.poll() is None, f"ended before {path.name}\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def end(self, limit: float = LIMIT) -> Ended:
        """Wait for the command to end, and briefly for its children. Return how it ended."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {limit} s\n{self.text()}") from None
        seconds = time.monotonic() - self.started
        until = time.monotonic() + 3
        while self.session() and time.monotonic() < until:
            time.sleep(0.05)
        return Ended(code, self.text(), seconds, [str(process) for process in self.session()])


def command(run_dir: Path, *overrides: str) -> list[str]:
    """Return `python -m trainapp` with the tiny settings."""
    return [sys.executable, "-m", "trainapp", *LAUNCHED, *overrides, f"hydra.run.dir={run_dir}"]


def launch(run_dir: Path, *overrides: str, env: Mapping[str, str] | None = None, limit: float = LIMIT) -> Ended:
    """Run to the end; no process of it may be left. Return how it ended."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with Launched(command(run_dir, *overrides), run_dir.parent, env) as launched:
        ended = launched.end(limit)
    assert ended.orphans == []
    return ended


def checkpoint(run_dir: Path, step: int) -> dict[str, dict]:
    """Return all tensors of a checkpoint, by part."""
    return runs.tensors(runs.checkpoint(run_dir, step))
