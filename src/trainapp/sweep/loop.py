"""The loop of a sweep: starts jobs as slots become free, answers their questions at rungs, and writes the journal.

Whatever kills it, the same command continues it: finished trials stay, running ones are waited for, interrupted ones
resume from their checkpoints, and the rest is proposed as if nothing had happened.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.files import json_object, shown
from trainapp.hooks import rungs
from trainapp.signals import ECHO, TIME_IS_UP, TO_BE_CONTINUED, deadline_of, handled_by, how_to_quit, named
from trainapp.sweep import jobs, leaderboard, rows, same_sweep, samplers
from trainapp.sweep.composing import ComposedJob, Composer
from trainapp.sweep.jobs import Job, MemoryNeed, Outcome
from trainapp.sweep.journal import Journal, Trial, objectives_of
from trainapp.sweep.pruner import Pruner
from trainapp.sweep.slots import SHARE, Slot, divide_machine
from trainapp.tracking.terminal import is_live
from trainapp.units import bytes_text, plural

_POLL = 0.1  # seconds between looks at the running jobs
_RETRIES = 3  # of a job that was killed, as by a machine without memory, before it has failed
_SHOW_EVERY = 1.0  # seconds between two lines of progress


@dataclass
class _Running:
    """A job that runs."""

    trial: Trial
    job: Job
    slot: Slot
    bytes: float = math.inf  # that it was given of a shared device; infinite if unknown


class SweepLoop:
    """The loop, from the first job that is free to start until nothing is left or a signal ends it."""

    def __init__(
        self,
        settings: Sweep,
        composer: Composer,
        propose: samplers.Propose,
        journal: Journal,
        config: Config,
        launcher: Any,
    ):
        """Prepare the loop.

        Args:
            settings: of the sweep.
            composer: composes its jobs.
            propose: proposes the configurations of new trials.
            journal: of the sweep; it has recorded what was asked for.
            config: of the first job.
            launcher: the launcher of Hydra that runs the jobs; None: they are processes on this machine.
        """
        self.settings = settings
        self.composer = composer
        self.propose = propose
        self.journal = journal
        self.config = config
        self.launcher = launcher
        self.folder = composer.folder
        self.pruner = Pruner(settings) if settings.pruner != "none" else None

        # Jobs.
        self.packs = settings.pack and launcher is None and config.activity.trains
        if launcher is None:
            self.slots = divide_machine(settings.parallel, config, self.packs)
        else:
            slot_count = 1 if settings.parallel == "auto" else int(settings.parallel)
            self.slots = [Slot()] * slot_count
        self.running: dict[int, _Running] = {}  # by trial
        self.to_resume = _trials_to_resume(journal.trials, settings.retry_failed)
        self._is_exhausted = False  # whether the sampler has found no other configuration
        self._kills: Counter[int] = Counter()  # by trial, in this process of the sweep

        # Packing.
        self._memory_needs: dict[int, MemoryNeed | None] = {}  # by trial; None: no estimate
        self._waits_for_memory = False  # until a job ends

        # Stopping.
        self.stop = 0  # the signal that ends the sweep, or TIME_IS_UP
        self._stopped_at = 0.0
        self._deadline = deadline_of("sweep.max_time", settings.max_time, time.time())

        # The terminal.
        self.bar = tqdm(bar_format="{desc}", disable=not is_live())
        self._shown_at = 0.0

    @property
    def direction(self) -> str:
        """The direction of the objective, max or min; empty while no trial has one.

        Raises UserError if trials differ where they are compared.
        """
        objectives = objectives_of(self.journal.facts)
        compares_trials = self.pruner is not None or self.settings.sampler != "grid"
        if len(objectives) > 1 and compares_trials:
            texts = ", ".join(" ".join(objective) for objective in sorted(objectives))
            raise UserError(f"objective: jobs have different ones ({texts}), which cannot be compared; set objective")
        if len(objectives) != 1:
            return ""
        _, direction = objectives.pop()
        return direction

    @property
    def count(self) -> int:
        """The number of jobs that the sweep has; of an endless space, `sweep.trials`."""
        return int(min(self.composer.space.size, self.settings.trials or math.inf))

    def run(self) -> int:
        """Run jobs until nothing is left or a signal ends the sweep. Return the exit status."""
        self._print_opening()
        with handled_by(self._handle), contextlib.closing(self.bar):
            try:
                self._run_jobs()
            except Exception:  # of the sweep itself: its jobs save and end
                for running in self.running.values():
                    running.job.terminate()
                while any(running.job.poll() is None for running in self.running.values()):
                    time.sleep(_POLL)
                print(self._how_to_continue, flush=True)
                raise
        states = self._states()
        self._print_closing(states)
        if self.stop or states["new"] or states["stopped"] or states["running"]:
            print(self._how_to_continue, flush=True)
            return TO_BE_CONTINUED
        return 1 if states["failed"] else 0

    def _run_jobs(self) -> None:
        """Collect jobs that have ended and start new ones, until nothing runs and nothing more begins."""
        self._find_running()
        has_announced_stop = False
        while True:
            self._collect()
            has_begun = not self.stop and self._begin_next()
            if self.stop and not has_announced_stop:
                has_announced_stop = True
                self._announce_stop()
            if not self.running and not has_begun:
                return
            self._show_progress()
            if not has_begun:
                time.sleep(_POLL)

    # What comes next

    def _begin_next(self) -> bool:
        """Begin a job if a slot is free. Return whether there was one."""
        is_full = len(self.running) >= len(self.slots)
        if is_full or self._waits_for_memory or self._has_failed_often():
            return False
        trial = self._next_trial()
        if trial is None:
            return False
        self._begin(trial)
        return True

    def _has_failed_often(self) -> bool:
        """Return whether `sweep.max_failures` is reached."""
        most = self.settings.max_failures
        return most is not None and self._states()["failed"] >= most

    def _next_trial(self) -> Trial | None:
        """Return the trial to begin or to continue: an interrupted one, a promoted one, or a new one."""
        if self.to_resume:
            return self.to_resume.pop(0)
        trial = self._promote()
        if trial is not None:
            return trial
        trial = self._propose_trial()
        if trial is not None:
            return trial
        self._is_exhausted = True
        return None if self.running else self._promote(is_last=True)

    def _promote(self, is_last: bool = False) -> Trial | None:
        """Promote a paused trial and return it; None if there is none. is_last: see `Pruner.promotable`."""
        if self.pruner is None:
            return None
        promotion = self.pruner.promotable(self.journal.trials, self.direction, is_last)
        if promotion is None:
            return None
        trial, rung = promotion
        self.journal.add("promote", number=trial.number, rung=rung)
        return trial

    def _propose_trial(self) -> Trial | None:
        """Add a new trial to the journal and return it; None if no configuration is left."""
        trials = self.journal.trials
        number = len(trials)
        if self._is_exhausted or number >= (self.settings.trials or math.inf):
            return None
        proposal = self.propose(number, trials, self.direction)
        if proposal is None:
            return None
        values, attributes = proposal
        self.journal.add("trial", number=number, values=values, attributes=attributes)
        return trials[number]

    # Starting a job

    def _begin(self, trial: Trial) -> None:
        """Start the trial's job; note why it cannot start; or put it back until another job has ended."""
        try:
            job = self.composer.job(trial.number, trial.values)
            self._require_unchanged(job)
        except UserError as error:
            message = "; ".join(str(error).splitlines())
            return self._note_end(trial, Outcome("failed", message, {}))
        if not self.packs:
            return self._start(trial, job, self._free_slots()[0], None)

        need = self._memory_need(job, self._free_slots()[0])
        fitting_slots = [slot for slot in self._free_slots() if self._fits(slot, need)]
        if not fitting_slots or self.stop:
            return self._put_back(trial, need)
        if need is not None and need.is_infeasible:
            size = f"{bytes_text(need.bytes)} of {bytes_text(need.device_bytes / SHARE)}"
            error_text = f"out of memory by its plan at micro-batch 1: it needs {size}"
            return self._note_end(trial, Outcome("infeasible", error_text, {}))
        return self._start(trial, job, fitting_slots[0], need)

    def _require_unchanged(self, job: ComposedJob) -> None:
        """Raise UserError if configuration files have changed: the job would not be like those that have run."""
        digest_before = self.journal.digests.get(job.name)
        if digest_before == job.digest:
            return
        first_job = self.composer.job(0, tuple(self.journal.first_request["values"]))
        changes = same_sweep.config_changes(self.journal, first_job.config)
        if digest_before or changes:
            what = "; ".join(changes) or "other files of this job"
            raise UserError(f"the configuration has changed since the sweep began: {what}; change it back")

    def _free_slots(self) -> list[Slot]:
        """Return the slots that have no job. Several may be equal, of which all are listed if one is free."""
        taken = [running.slot for running in self.running.values()]
        return [slot for slot in self.slots if self.slots.count(slot) > taken.count(slot)]

    def _start(self, trial: Trial, job: ComposedJob, slot: Slot, need: MemoryNeed | None) -> None:
        """Start a job in its slot. need: see `_memory_share`."""
        bytes_given, overrides = self._memory_share(job, slot, need)
        threads = slot.threads if trial.threads is None else trial.threads
        folder = os.path.relpath(job.folder, self.folder)
        self.journal.add("start", number=trial.number, threads=threads, folder=folder)
        self._prepare_rungs(trial, job.folder)
        self._announce_start(trial, job, slot)
        process = self._start_process(job, slot, threads, overrides)
        self.running[trial.number] = _Running(trial, process, slot, bytes_given)
        if self.stop:  # a signal during the start
            process.terminate()

    def _prepare_rungs(self, trial: Trial, folder: Path) -> None:
        """Write the rungs ahead of the trial for its run, and remove what is left of earlier questions."""
        for name in (rungs.ASKS, rungs.ANSWERS, rungs.RUNGS):
            (folder / name).unlink(missing_ok=True)
        rungs_ahead = self.pruner.rungs(trial) if self.pruner else []
        if rungs_ahead:
            folder.mkdir(parents=True, exist_ok=True)
            rungs.write(folder / rungs.RUNGS, {"rungs": rungs_ahead, "launched": self.launcher is not None})

    def _start_process(self, job: ComposedJob, slot: Slot, threads: int | None, overrides: list[str]) -> Job:
        """Start the job, by the launcher if there is one. overrides: those that the sweep adds to the job's."""
        if self.launcher is not None:
            launcher = self.launcher
            return jobs.Launched(lambda: launcher.launch([job.overrides], initial_job_idx=job.number))
        if self.pruner and not job.config.chooses("checkpointing.keep_last"):
            overrides = [*overrides, "checkpointing.keep_last=1"]  # of paused runs there may be many
        return jobs.start(self.composer.command(job, overrides), overrides, job.folder, slot, threads)

    # Packing: jobs that share a device by their plans

    def _memory_need(self, job: ComposedJob, slot: Slot) -> MemoryNeed | None:
        """Return what the job's plan says about its memory. It is planned once."""
        if job.number not in self._memory_needs:
            folder = job.folder / "plan"
            command = self.composer.command(job, ["mode=plan", "plan.techniques=false"], folder)
            self._memory_needs[job.number] = jobs.plan_memory(command, folder, slot)
        return self._memory_needs[job.number]

    def _fits(self, slot: Slot, need: MemoryNeed | None) -> bool:
        """Return whether a job fits beside those on the slot's device. One without an estimate, or that needs all of
        it, has the device alone.
        """
        bytes_used = sum(running.bytes for running in self.running.values() if running.slot.gpus == slot.gpus)
        if bytes_used == 0:
            return True
        return need is not None and bytes_used + need.bytes <= need.device_bytes

    def _put_back(self, trial: Trial, need: MemoryNeed | None) -> None:
        """Put a trial back until a job ends."""
        self.to_resume.insert(0, trial)
        self._waits_for_memory = True
        if need is not None and need.is_infeasible:  # beside others: it is planned once more
            del self._memory_needs[trial.number]

    def _memory_share(self, job: ComposedJob, slot: Slot, need: MemoryNeed | None) -> tuple[float, list[str]]:
        """Return the bytes that the job is given of its device, infinite if unknown, and the overrides that tell it.

        Args:
            job: the job.
            slot: its slot.
            need: the job's, with `sweep.pack`; None: not known.
        """
        if not self.packs:
            return math.inf, slot.memory_overrides(job.config) if self.launcher is None else []
        if need is None or need.bytes > need.device_bytes:
            return math.inf, []
        overrides = [f"memory.limit={need.bytes}"]
        if job.config.batch.eval_micro_size == "auto":  # of another size the plan knows nothing
            overrides.append(f"batch.eval_micro_size={need.micro_size}")
        return need.bytes, overrides

    # What has happened

    def _find_running(self) -> None:
        """Find the jobs that outlived an earlier process of this sweep; `_collect` resumes those that did not."""
        trials = {Path(trial.folder): trial for trial in self.journal.trials if trial.state == "running"}
        for folder, orphan in jobs.find_orphans(trials).items():
            trial = trials[folder]
            slots = self._free_slots() or self.slots
            self.running[trial.number] = _Running(trial, orphan, _slot_of(orphan, slots))
            if orphan.poll() is None:
                self._say(f"job {trial.number} still runs")

    def _collect(self) -> None:
        """Answer the questions of jobs, and note which have ended. At the deadline, stop the sweep."""
        for number, running in list(self.running.items()):
            status = running.job.poll()
            self._answer(running.trial)  # also one asked just before it ended
            if status is None:
                continue
            del self.running[number]
            self._waits_for_memory = False
            # A user who continues the run by hand asks no sweep.
            (Path(running.trial.folder) / rungs.RUNGS).unlink(missing_ok=True)
            self._finish(running, status)
        if not self.stop and time.monotonic() >= self._deadline:
            self._pass_on(TIME_IS_UP)

    def _answer(self, trial: Trial) -> None:
        """Answer a job's question at a rung, if it has asked one."""
        if self.pruner is None:
            return
        folder = Path(trial.folder)
        question = json_object(folder / rungs.ASKS)
        if not question:
            return
        rung = question["rung"]
        if rung not in trial.rung_values:
            self.journal.add("rung", number=trial.number, **question)
        if trial.is_held and self.pruner.passes(trial, rung, self.journal.trials, self.direction):
            self.journal.add("promote", number=trial.number, rung=rung)
        rungs.write(folder / rungs.ANSWERS, {"rung": rung, "passes": rung in trial.passed_rungs})
        (folder / rungs.ASKS).unlink()

    def _finish(self, running: _Running, status: int) -> None:
        """Note the end of a job. One that was lost, though the sweep goes on, is resumed, a few times."""
        trial = running.trial
        outcome = jobs.outcome(trial, self.config.mode, status, getattr(running.job, "error", ""))
        if self.stop and outcome.state == "stopped":  # as asked, also where it had not begun to hear signals
            outcome = outcome._replace(error="")
        is_lost = outcome.state == "stopped" and status < 0 and not self.stop  # killed, or an orphan that has ended
        if is_lost and status != jobs.NOT_OUR_CHILD:
            self._kills[trial.number] += 1
        if is_lost and self._kills[trial.number] > _RETRIES:
            is_lost = False
            outcome = outcome._replace(state="failed", error=f"{outcome.error}, {_RETRIES + 1} times")
        self._note_end(trial, outcome)
        if is_lost:  # first of all, so that what comes next knows its result
            self.to_resume.insert(0, trial)

    def _note_end(self, trial: Trial, outcome: Outcome) -> None:
        """Record how a trial has ended, print it, and copy it to the storage."""
        self.journal.add("end", number=trial.number, **outcome._asdict())
        self._say(_end_text(trial))
        if self.settings.storage and self.direction:
            trials = self.journal.trials
            space = self.composer.space
            try:
                samplers.copy_to_storage(self.settings.storage, str(self.folder), space, trials, self.direction)
            except UserError as error:  # the jobs do not depend on it, and the next copy has all
                self._say(str(error))

    # Signals

    def _handle(self, number: int, frame: object) -> None:
        """Handle a signal. Prints nothing: it may come in the middle of another print."""
        if not self.stop or time.monotonic() - self._stopped_at >= ECHO:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Ask the running jobs to save and end. After a second signal, or with a launcher, whose jobs no signal
        reaches, the sweep leaves at once.
        """
        is_second = self.stop not in (0, TIME_IS_UP)
        self.stop = number
        self._stopped_at = time.monotonic()
        for running in self.running.values():
            running.job.terminate()
        if is_second or self.launcher:
            os.write(1, f"{self._how_to_continue}\n".encode())
            os._exit(128 + number if is_second else TO_BE_CONTINUED)

    # The terminal

    def _states(self) -> Counter[str]:
        """Return the number of trials in each state."""
        return Counter(trial.state for trial in self.journal.trials)

    @property
    def _how_to_continue(self) -> str:
        """The command that continues the sweep, for a message."""
        return f"Continue with:\n  python -m trainapp continue {shown(self.folder)}"

    def _print_opening(self) -> None:
        """Print what the sweep has to do, and what it has done."""
        parts = [f"sweep of {plural(self.count, 'job')}", self._concurrency()]
        if not self.packs:
            memory_overrides = self.slots[0].memory_overrides(self.config)
            parts += [f"each with {override}" for override in memory_overrides]
        parts.append(f"in {shown(self.folder)}")
        earlier_states = [f"{number} {state}" for state, number in self._states().items()]
        print("; ".join([", ".join(parts), *earlier_states]))
        dimensions = [f"  {dimension.key}: {dimension}" for dimension in self.composer.space.dimensions]
        print("\n".join(dimensions), flush=True)

    def _concurrency(self) -> str:
        """Return how many jobs run at a time, for a message."""
        number = len(self.slots) if len(self.slots) > 1 else "one"
        text = f"{number} at a time"
        return f"at most {text}" if self.packs else text

    def _announce_start(self, trial: Trial, job: ComposedJob, slot: Slot) -> None:
        """Print that a job starts or continues, where, and with which settings."""
        verb = "continues" if (job.folder / "checkpoints").exists() else "starts"
        text = f"job {trial.number} {verb}"
        if str(slot):
            text += f" on {slot}"
        swept = " ".join(self.composer.space.swept_overrides(trial.values)).replace("+", "")
        if swept:
            text += f": {swept}"
        self._say(text)

    def _show_progress(self) -> None:
        """Show the numbers of jobs by state, and the best value, on the terminal's last line."""
        if self.bar.disable or time.monotonic() - self._shown_at < _SHOW_EVERY:
            return
        self._shown_at = time.monotonic()
        states = self._states()
        shown_states = ("finished", "running", "paused", "failed")
        counts = [f"{states[name]} {name}" for name in shown_states if states[name]]
        text = f"{', '.join(counts)} of {self.count}"
        best = leaderboard.best_text(rows.read_sweep(self.journal, is_live=False))
        self.bar.set_description_str(f"{text}; best {best}" if best else text)

    def _announce_stop(self) -> None:
        """Print that the sweep stops, and what its jobs do. (With a launcher it has left at once, see `_pass_on`.)"""
        jobs_do = "the running jobs save and end"
        if self.stop == TIME_IS_UP:
            self._say(f"sweep.max_time: {jobs_do}")
        else:
            self._say(f"{named(self.stop)}: {jobs_do}; {how_to_quit(self.stop)}")

    def _print_closing(self, states: Counter[str]) -> None:
        """Print the table, and what the sweep has left undone."""
        begun_count = len(self.journal.trials)
        if begun_count:
            leaderboard.show(self.folder)
        if self._has_failed_often():
            print(f"sweep.max_failures={self.settings.max_failures}: no more jobs were started")
        if states["failed"]:
            print(f"{states['failed']} failed; sweep.retry_failed=true runs them again when the sweep is continued")
        if states["paused"]:
            print(f"{states['paused']} paused; `trainapp continue {shown(self.folder)}/NUMBER` trains one to its end")
        if self.count > begun_count and self.settings.sampler != "grid":
            text = f"{self.count - begun_count} jobs have not begun"
            why = "sweep.sampler: found no other configuration, and "
            print(why + text if self._is_exhausted else text)

    def _say(self, text: str) -> None:
        """Print a line, above the line of progress if there is one."""
        if self.bar.disable:
            print(text, flush=True)
        else:
            tqdm.write(text)


def _trials_to_resume(trials: Sequence[Trial], retry_failed: bool) -> list[Trial]:
    """Return the trials that an earlier process of the sweep has left to do."""
    states = ["new", "stopped"]
    if retry_failed:
        states += ["failed", "infeasible"]
    trials_to_resume = []
    for trial in trials:
        was_promoted = trial.state == "paused" and not trial.is_held  # and then killed
        if trial.state in states or was_promoted:
            trials_to_resume.append(trial)
    return trials_to_resume


def _slot_of(orphan: jobs.Orphan, slots: Sequence[Slot]) -> Slot:
    """Return the slot with the job's GPUs, otherwise the first one."""
    for slot in slots:
        if slot.gpus and ",".join(slot.gpus) == orphan.gpus:
            return slot
    return slots[0]


def _end_text(trial: Trial) -> str:
    """Return how a trial has ended, for a line of output."""
    facts = trial.facts
    text = f"job {trial.number} {trial.state}"
    if trial.state in ("paused", "stopped") and "steps" in facts:
        text += f" at step {facts['steps']}"
    if facts.get("best_objective") is not None:
        text += f", best {facts['metric']} {facts['best_objective']:.4g} at step {facts['best_step']}"
    if trial.error:
        text += f": {trial.error}"
        log = Path(trial.folder) / jobs.LOG
        if trial.folder and log.exists():
            text += f"; see {shown(log)}"
    return text
