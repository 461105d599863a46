"""The jobs that run, each in its slot: what starts there, and what they may use of a device that they share."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config, Sweep
from trainapp.sweep import jobs
from trainapp.sweep.composing import ComposedJob, Composer
from trainapp.sweep.jobs import Job, MemoryNeed
from trainapp.sweep.journal import Trial
from trainapp.sweep.slots import Slot, divide_machine


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
        jobs.forget_failure(job.folder)
        process: Job
        if self.launcher is not None:
            launcher = self.launcher
            process = jobs.Launched(lambda: launcher.launch([job.overrides], initial_job_idx=job.number))
        else:
            if self._pauses and not job.config.chooses("checkpointing.keep_last"):
                overrides.append("checkpointing.keep_last=1")  # of paused runs there may be many
            command = self.composer.command(job, overrides)
            process = jobs.start(command, overrides, job.folder, slot, threads)
        self.by_trial[trial.number] = RunningJob(trial, process, slot, bytes_given)

    def find_orphans(self, trials: Sequence[Trial]) -> list[Trial]:
        """Add the jobs of an earlier process of the sweep, ended or not. Return the trials of those that still run.

        trials: that were running when it was killed.
        """
        trial_by_folder = {Path(trial.folder): trial for trial in trials}
        alive = []
        for folder, orphan in jobs.find_orphans(trial_by_folder).items():
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
            self._memory_needs[job.number] = jobs.plan_memory(command, folder, slot)
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


def _slot_of(orphan: jobs.Orphan, slots: Sequence[Slot]) -> Slot:
    """Return the slot with the job's GPUs, otherwise the first one."""
    for slot in slots:
        if slot.gpus and ",".join(slot.gpus) == orphan.gpus:
            return slot
    return slots[0]
