"""The jobs that run, each in its slot: their processes, and what they may use of a device that they share.

A job's process leads a session of its own, so that a terminal's Ctrl-C reaches the sweep alone, which passes it on
once. What it prints goes to `console.log` in its directory. It is found again after the sweep itself was killed.
"""

import contextlib
import functools
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.files import PLAN, RESULT, json_object
from trainapp.hooks.rungs import JOB
from trainapp.launch.environment import SWEEP_SHARE
from trainapp.report.run_files import state_of
from trainapp.run import directory
from trainapp.sweep.composing import ComposedJob, Composer
from trainapp.sweep.journal import Trial
from trainapp.sweep.outcome import CONSOLE_LOG, NOT_OUR_CHILD, START_MARK, TrialState
from trainapp.sweep.slots import SHARE, Slot, divide_machine


class MemoryNeed(NamedTuple):
    """What a plan says about a job's memory."""

    bytes: int  # that the job needs
    device_bytes: int  # that all jobs of a device may use together
    micro_size: int
    is_infeasible: bool  # it does not fit at micro-batch 1


@dataclass
class Orphan:
    """A job started by an earlier process of the sweep: its processes on this machine, and its lock, which also tells
    whether it runs on another.
    """

    folder: Path
    processes: list[psutil.Process] = field(default_factory=list)
    gpus: str | None = None  # as in CUDA_VISIBLE_DEVICES

    def poll(self) -> int | None:
        """Return NOT_OUR_CHILD once it has ended, None while it runs."""
        is_running = any(map(_is_alive, self.processes)) or directory.is_in_use(self.folder)
        if is_running:
            return None
        return NOT_OUR_CHILD

    def terminate(self) -> None:
        """Send SIGTERM to its first process, if that is on this machine."""
        with contextlib.suppress(psutil.Error, IndexError):
            self.processes[0].terminate()


class Launched:
    """A job that a launcher of Hydra runs, in a thread that waits for it. No signal reaches it from here."""

    def __init__(self, launch: Callable[[], Any]):
        self.launch = launch
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for returned in self.launch():
                _ = returned.return_value  # raises the job's error
        except UserError as error:
            self.error = str(error)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"

    def poll(self) -> int | None:
        """Return 1 after an error, 0 after none, None while it runs."""
        if self._thread.is_alive():
            return None
        return 1 if self.error else 0

    def terminate(self) -> None:
        """Do nothing: it is left to run."""


# `poll()` returns the exit status, NOT_OUR_CHILD if another process has started it, and None while it runs.
# `terminate()` asks it to save and end, by SIGTERM: before its own handler, SIGINT would look like an error.
Job = subprocess.Popen[bytes] | Orphan | Launched


@dataclass
class RunningJob:
    """A job that runs."""

    trial: Trial
    job: Job
    slot: Slot
    bytes: float = math.inf  # that it was given of a shared device; infinite if unknown


class RunningJobs:
    """The jobs that run, by trial, and the slots in which others may start."""

    def __init__(self, settings: Sweep, composer: Composer, config: Config, launcher: Any):
        """Divide the machine.

        Args:
            settings: of the sweep.
            composer: composes its jobs.
            config: of the first job.
            launcher: the launcher of Hydra that runs the jobs; None: they are processes on this machine.
        """
        self.composer = composer
        self.launcher = launcher
        self.packs = settings.pack and launcher is None and config.activity.trains  # by the jobs' plans

        # A launcher divides its own machines: its slots only limit how many jobs run at a time.
        if launcher is None:
            self.slots = divide_machine(settings.parallel, config, self.packs)
        else:
            slot_count = 1 if settings.parallel == "auto" else int(settings.parallel)
            self.slots = [Slot()] * slot_count

        self.by_trial: dict[int, RunningJob] = {}
        self.waits_for_memory = False  # until a job ends
        self._memory_needs: dict[int, MemoryNeed | None] = {}  # by trial; None: no estimate
        self._pauses = settings.pruner != "none"

    def __len__(self) -> int:
        """The number of jobs that run."""
        return len(self.by_trial)

    @property
    def can_start(self) -> bool:
        """Whether a slot is free and its memory may suffice."""
        return len(self) < len(self.slots) and not self.waits_for_memory

    def free_slots(self) -> list[Slot]:
        """Return the slots that have no job. Several may be equal, of which all are listed if one is free."""
        taken = [running.slot for running in self.by_trial.values()]
        return [slot for slot in self.slots if self.slots.count(slot) > taken.count(slot)]

    # Processes

    def start(self, trial: Trial, job: ComposedJob, slot: Slot, threads: int | None, need: MemoryNeed | None) -> None:
        """Start a job in its slot, by the launcher if there is one.

        Args:
            trial: of the job.
            job: the job.
            slot: a free one.
            threads: of torch; None: torch's choice.
            need: see `_memory_share`.
        """
        bytes_given, overrides = self._memory_share(job, slot, need)
        forget_failure(job.folder)
        process: Job
        if self.launcher is not None:
            launcher = self.launcher
            process = Launched(lambda: launcher.launch([job.overrides], initial_job_idx=job.number))
        else:
            if self._pauses and not job.config.chooses("checkpointing.keep_last"):
                overrides.append("checkpointing.keep_last=1")  # of paused runs there may be many
            command = self.composer.command(job, overrides)
            process = start_process(command, overrides, job.folder, slot, threads)
        self.by_trial[trial.number] = RunningJob(trial, process, slot, bytes_given)

    def find_orphans(self, trials: Sequence[Trial]) -> list[Trial]:
        """Add the jobs of an earlier process of the sweep, ended or not. Return the trials of those that still run.

        trials: that were running when it was killed.
        """
        trial_by_folder = {Path(trial.folder): trial for trial in trials}
        alive = []
        for folder, orphan in find_orphans(trial_by_folder).items():
            trial = trial_by_folder[folder]
            slot = _slot_of(orphan, self.free_slots() or self.slots)
            self.by_trial[trial.number] = RunningJob(trial, orphan, slot)
            if orphan.poll() is None:
                alive.append(trial)
        return alive

    def remove(self, running: RunningJob) -> None:
        """Free the slot of a job that has ended."""
        del self.by_trial[running.trial.number]
        self.waits_for_memory = False

    def terminate(self) -> None:
        """Ask all to save and end."""
        for running in self.by_trial.values():
            running.job.terminate()

    def wait(self, poll: float) -> None:
        """Wait until all have ended. poll: seconds between looks at them."""
        while any(running.job.poll() is None for running in self.by_trial.values()):
            time.sleep(poll)

    # Packing: jobs that share a device by their plans

    def memory_need(self, job: ComposedJob) -> MemoryNeed | None:
        """Return what the job's plan says about its memory, None if there is no estimate. It is planned once."""
        if job.number not in self._memory_needs:
            folder = job.folder / "plan"
            command = self.composer.command(job, ["mode=plan", "plan.techniques=false"], folder)
            slot = self.free_slots()[0]
            self._memory_needs[job.number] = plan_memory(command, folder, slot)
        return self._memory_needs[job.number]

    def fitting_slot(self, need: MemoryNeed | None) -> Slot | None:
        """Return a free slot in which a job with this need fits, if there is one."""
        for slot in self.free_slots():
            if self._fits(slot, need):
                return slot
        return None

    def wait_for_memory(self, trial: Trial, need: MemoryNeed | None) -> None:
        """Start nothing until a job ends, since this trial does not fit."""
        self.waits_for_memory = True
        if need is not None and need.is_infeasible:  # beside others: it is planned once more
            del self._memory_needs[trial.number]

    def _fits(self, slot: Slot, need: MemoryNeed | None) -> bool:
        """Return whether a job fits beside those on the slot's device. One without an estimate, or that needs all of
        it, has the device alone.
        """
        neighbours = [running for running in self.by_trial.values() if running.slot.gpus == slot.gpus]
        bytes_used = sum(running.bytes for running in neighbours)
        if bytes_used == 0:
            return True
        return need is not None and bytes_used + need.bytes <= need.device_bytes

    def _memory_share(self, job: ComposedJob, slot: Slot, need: MemoryNeed | None) -> tuple[float, list[str]]:
        """Return the bytes that the job is given of its device, infinite if unknown, and the overrides that tell it.

        Args:
            job: the job.
            slot: its slot.
            need: the job's, with `sweep.pack`; None: not known.
        """
        if self.launcher is not None:
            return math.inf, []
        if not self.packs:
            return math.inf, slot.memory_overrides(job.config)
        if need is None or need.bytes > need.device_bytes:
            return math.inf, []

        # Limit the job to what its plan says it needs.
        overrides = [f"memory.limit={need.bytes}"]
        if job.config.batch.eval_micro_size == "auto":  # of another size the plan knows nothing
            overrides.append(f"batch.eval_micro_size={need.micro_size}")
        return need.bytes, overrides


def forget_failure(folder: Path) -> None:
    """Remove result.json of a failed job before it restarts, so that an early failure is not judged by the old file."""
    if state_of(json_object(folder / RESULT)) == TrialState.FAILED:
        (folder / RESULT).unlink()


def start_process(
    command: Sequence[str], sweep_overrides: Sequence[str], folder: Path, slot: Slot, threads: int | None
) -> subprocess.Popen[bytes]:
    """Start a job in its slot.

    Args:
        command: of the job.
        sweep_overrides: the overrides among the command's that the sweep adds.
        folder: of the job.
        slot: whose cores and GPUs it gets.
        threads: of torch; None: torch's choice.
    """
    environment = _environment(folder, sweep_overrides, slot, threads)
    keep_to_cores = None
    if slot.cores:
        keep_to_cores = functools.partial(os.sched_setaffinity, 0, slot.cores)

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CONSOLE_LOG).open("ab") as log:
        started_at = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(f"{START_MARK}{started_at}\n".encode())
        log.flush()  # before the process prints into the same file
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=keep_to_cores,
        )


def _environment(folder: Path, sweep_overrides: Sequence[str], slot: Slot, threads: int | None) -> dict[str, str]:
    """Return the environment variables of a job's process."""
    variables = dict(os.environ)
    variables[JOB] = str(folder)
    variables[SWEEP_SHARE] = "\n".join(sweep_overrides)

    # Set by `__main__`: with it, a user's mistake would come with its traceback.
    variables.pop("HYDRA_FULL_ERROR", None)

    # The job's share of the machine.
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
        variables["MKL_NUM_THREADS"] = str(threads)
    if slot.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    return variables


def find_orphans(folders: Iterable[Path]) -> dict[Path, Orphan]:
    """Return the jobs in these directories, with their processes that still run, the first one first."""
    orphans = {folder: Orphan(folder) for folder in folders}
    if not orphans:
        return orphans

    # A job's processes have its directory in their environment. Other users' environments cannot be read.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            folder = Path(variables.get(JOB, ""))
            orphan = orphans.get(folder)
            if orphan is not None and process.pid != os.getpid():
                orphan.processes.append(process)
                orphan.gpus = variables.get("CUDA_VISIBLE_DEVICES")
    for orphan in orphans.values():
        orphan.processes.sort(key=lambda process: process.create_time())
    return orphans


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _slot_of(orphan: Orphan, slots: Sequence[Slot]) -> Slot:
    """Return the slot with the job's GPUs, otherwise the first one."""
    for slot in slots:
        if slot.gpus and ",".join(slot.gpus) == orphan.gpus:
            return slot
    return slots[0]


def plan_memory(command: Sequence[str], folder: Path, slot: Slot) -> MemoryNeed | None:
    """Plan a job in a process, which takes some seconds. Return None if there is no estimate.

    Args:
        command: of mode=plan, in that folder.
        folder: of the plan.
        slot: of the job.
    """
    # Remove an earlier plan: this one may fail.
    plan_path = folder / PLAN
    plan_path.unlink(missing_ok=True)
    environment = _environment(folder, [], slot, slot.threads)
    subprocess.run(command, capture_output=True, env=environment)
    facts = json_object(plan_path)
    peak = facts.get("peak_bytes")
    if peak is None:
        return None

    # The job gets its peak plus the plan's margin.
    limit = facts["limit_bytes"]
    peak_with_margin = peak * (1 + facts["margin"])
    return MemoryNeed(
        bytes=int(peak_with_margin) + 1,
        device_bytes=int(SHARE * limit),
        micro_size=facts["micro_size"],
        is_infeasible=not facts["largest_micro_size"] and peak > limit,
    )
