"""The processes of a sweep's jobs: started with a share of the machine, found again after the sweep itself was killed.

Each leads a session of its own, so that a terminal's Ctrl-C reaches the sweep alone, which passes it on once. What it
prints goes to `console.log` in its directory.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainapp.config.command_line import message_in
from trainapp.config.excludes import require_several_ranks
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.files import json_object
from trainapp.hooks.rungs import JOB
from trainapp.launch.environment import SWEEP_SHARE
from trainapp.report.run_files import state_of
from trainapp.run import directory
from trainapp.signals import TO_BE_CONTINUED
from trainapp.sweep.journal import Trial, facts_of
from trainapp.units import parse_memory_size

LOG, RESULT, PLAN = "console.log", "result.json", "plan.json"
_ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # from outside
NOT_OUR_CHILD = -1000  # exit status of a process that this one has not started
_MARK = "== started "  # before what each process prints
SHARE = 0.9  # of the memory of jobs that share a device: the rest is for what no allocator counts


@dataclass(frozen=True)
class Slot:
    """A share of the machine: GPUs by their names in CUDA_VISIBLE_DEVICES, CPU cores, and the number of slots with
    which it shares its memory. None: all of it.
    """

    gpus: tuple[str, ...] | None = None
    cores: tuple[int, ...] | None = None
    sharing: int = 1

    def __str__(self) -> str:
        return f"GPU {', '.join(self.gpus)}" if self.gpus else ""

    @property
    def threads(self) -> int | None:
        """Threads of a new trial: as many as it has cores, unless the user has set a number."""
        if given := os.environ.get("OMP_NUM_THREADS"):
            return int(given.partition(",")[0])
        return len(self.cores) if self.cores else None

    def memory(self, config: Config) -> list[str]:
        """The override that gives a job an equal share of `memory.limit`."""
        if self.sharing == 1:
            return []
        limit = config.memory.limit
        if limit is None or parse_memory_size(limit, 0) == 0:  # a fraction
            return [f"memory.limit={float(limit or SHARE) / self.sharing:.4g}"]
        return [f"memory.limit={parse_memory_size(limit, 0) // self.sharing}"]


def gpus_here() -> list[str]:
    """The visible CUDA devices, as in CUDA_VISIBLE_DEVICES. If a driver is here, a process of its own asks torch."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name.strip() and name.strip() != "-1"]
    if not (shutil.which("nvidia-smi") or Path("/dev/kfd").exists()):
        return []
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return [str(number) for number in range(int(subprocess.run(command, capture_output=True, text=True).stdout or 0))]


def slots(parallel: int | str, config: Config, packs: bool = False) -> list[Slot]:
    """The machine divided for `sweep.parallel` jobs of this configuration, which says how many devices one takes.

    packs: `auto` is then four per device.
    """
    gpus = [] if config.train.device in ("cpu", "mps") or config.mode == "plan" else gpus_here()
    each = 1
    if config.parallel.strategy != "single":
        each = len(gpus) or 1 if config.parallel.devices == "auto" else int(config.parallel.devices)
        if config.mode != "plan" and (gpus or config.parallel.devices != "auto"):
            require_several_ranks(config, each, f"parallel.devices={config.parallel.devices}")
    if each > len(gpus) > 0:
        raise UserError(f"parallel.devices={each}: this machine has {len(gpus)} GPUs")
    fitting = len(gpus) // each
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    count = int(parallel) if parallel != "auto" else (fitting or 1) * (4 if packs else 1)
    found = []
    for number in range(count):
        own = tuple(cores[number * len(cores) // count : (number + 1) * len(cores) // count]) or tuple(cores)
        first = number % fitting * each if fitting else 0
        devices = tuple(gpus[first : first + each]) if gpus else None
        found.append(Slot(devices, own if count > 1 and cores else None, -(-count // (fitting or 1))))
    return found


class Need(NamedTuple):
    """What a plan says of a job: the bytes that it needs, and those that all jobs of a device may have together.
    is_infeasible: it does not fit at micro-batch 1.
    """

    bytes: int
    room: int
    micro_size: int
    is_infeasible: bool


def need(command: Sequence[str], folder: Path, slot: Slot) -> Need | None:
    """Plan a job in a process, which takes some seconds. command: of mode=plan, in that folder. None: no estimate."""
    (folder / PLAN).unlink(missing_ok=True)
    subprocess.run(command, capture_output=True, env=_environment(folder, [], slot, slot.threads))
    facts = json_object(folder / PLAN)
    if (peak := facts.get("peak_bytes")) is None:
        return None
    limit, is_infeasible = facts["limit_bytes"], not facts["largest_micro_size"] and peak > facts["limit_bytes"]
    return Need(int(peak * (1 + facts["margin"])) + 1, int(SHARE * limit), facts["micro_size"], is_infeasible)


@dataclass
class Orphan:
    """A job that an earlier process of the sweep has started: its processes here, and on other machines its lock."""

    folder: Path
    processes: list[psutil.Process] = field(default_factory=list)
    gpus: str | None = None  # as in CUDA_VISIBLE_DEVICES

    def poll(self) -> int | None:
        return None if any(map(_is_alive, self.processes)) or directory.is_in_use(self.folder) else NOT_OUR_CHILD

    def terminate(self) -> None:
        with contextlib.suppress(psutil.Error, IndexError):
            self.processes[0].terminate()


class Launched:
    """A job that a launcher of Hydra runs, in a thread that waits for it. No signal reaches it from here."""

    def __init__(self, launch: Callable[[], Any]):
        self.launch, self.error = launch, ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for returned in self.launch():
                _ = returned.return_value  # raises the job's error
        except BaseException as error:
            self.error = f"{'' if isinstance(error, UserError) else f'{type(error).__name__}: '}{error}"

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else int(bool(self.error))

    def terminate(self) -> None:
        pass


# `poll()` is the exit status, NOT_OUR_CHILD if another process has started it, and None while it runs. `terminate()`
# asks to save and end, by SIGTERM: before its own handler, SIGINT would look like an error.
Job = subprocess.Popen[bytes] | Orphan | Launched


def start(command: Sequence[str], more: Sequence[str], folder: Path, slot: Slot, threads: int | None) -> Job:
    """Start a job in its slot. more: the overrides among the command's that are the sweep's own. threads: of torch;
    None: torch's choice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab") as log:
        log.write(f"{_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        log.flush()
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(folder, more, slot, threads),
            start_new_session=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, slot.cores or ())) if slot.cores else None,
        )


def _environment(folder: Path, more: Sequence[str], slot: Slot, threads: int | None) -> dict[str, str]:
    env = dict(os.environ) | {JOB: str(folder), SWEEP_SHARE: "\n".join(more)}
    env.pop("HYDRA_FULL_ERROR", None)  # set by `__main__`: with it, a user's mistake would come with its traceback
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return env if slot.gpus is None else env | {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)}


def orphans(folders: Iterable[Path]) -> dict[Path, Orphan]:
    """The jobs in these directories, with their processes that still run."""
    by_folder = {folder: Orphan(folder) for folder in folders}
    for process in psutil.process_iter() if by_folder else ():
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            own = by_folder.get(Path(env.get(JOB, "")))
            if own is not None and process.pid != os.getpid():
                own.processes.append(process)
                own.gpus = env.get("CUDA_VISIBLE_DEVICES")
    for own in by_folder.values():
        own.processes.sort(key=lambda process: process.create_time())
    return by_folder


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Outcome(NamedTuple):
    """How a job's process ended. state, error, facts: as in `Trial`."""

    state: str
    error: str
    facts: dict[str, Any]


def outcome(trial: Trial, mode: str, status: int, error: str = "") -> Outcome:
    """Judge by the exit status and by what is in the job's directory. error: the launcher's."""
    folder = Path(trial.folder)
    result = json_object(folder / (PLAN if mode == "plan" else RESULT))
    is_complete = state_of(result) == "finished" if mode == "train" else bool(result)
    number, facts = -status if status < 0 else status - 128, facts_of(result)
    if (status == NOT_OUR_CHILD and is_complete) or (status == 0 and not result.get("stopped")):
        return Outcome("finished", "", facts)
    error = error or (_error_in(folder / LOG) if status > 0 else "")
    if number in _ENDS or status < 0:
        error = "" if status == NOT_OUR_CHILD else f"ended by {signal.Signals(number).name}"
    if (
        status in (0, NOT_OUR_CHILD, TO_BE_CONTINUED)
        or number in _ENDS
        or "another run is using this directory" in error
    ):
        kept = "" if status in (0, TO_BE_CONTINUED) else error
        return Outcome("paused", "", facts) if trial.is_held else Outcome("stopped", kept, facts)
    return Outcome("infeasible" if error.startswith("out of memory") else "failed", error, facts)


def _error_in(log: Path) -> str:
    """The last message in a job's output: for the user, or of a traceback."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = text.rpartition(_MARK)[2].splitlines()[1:]
    # Of a traceback, the line after the indented ones; notes may follow it.
    ends = [own for before, own in itertools.pairwise(lines) if before.startswith(" ") and not own.startswith(" ")]
    return "; ".join(message_in(lines)[:2]) or (ends or lines or ["no message"])[-1].strip()
