"""The loop of a sweep: starts jobs as slots become free, answers their questions at rungs, and writes the journal.

Whatever kills it, the same command continues it: finished trials stay, running ones are waited for, interrupted ones
resume from their checkpoints, and the rest is proposed as if nothing had happened.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.hooks import rungs
from trainapp.signals import ECHO, TIME_IS_UP, TO_BE_CONTINUED, deadline_of, handled_by
from trainapp.sweep import leaderboard, outcome, samplers
from trainapp.sweep.composing import ComposedJob, Composer
from trainapp.sweep.jobs import MemoryNeed, RunningJob, RunningJobs
from trainapp.sweep.journal import Journal, Trial
from trainapp.sweep.outcome import Outcome, TrialState
from trainapp.sweep.slots import SHARE, Slot
from trainapp.sweep.terminal import SweepTerminal
from trainapp.sweep.trial_queue import RETRIES, TrialQueue
from trainapp.units import bytes_text

_POLL = 0.1  # seconds between looks at the running jobs
_UNDONE = (TrialState.NEW, TrialState.RUNNING, TrialState.STOPPED)  # what a continued sweep has left to do


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
        self.composer = composer
        self.journal = journal
        self.mode = config.mode
        self.launcher = launcher
        self.queue = TrialQueue(settings, composer.space, propose, journal)
        self.running = RunningJobs(settings, composer, config, launcher)
        self.terminal = SweepTerminal(settings, journal, self.queue, self.running, config)

        # Stopping.
        self.stop = 0  # the signal that ends the sweep, or TIME_IS_UP
        self._stopped_at = 0.0
        self._deadline = deadline_of("sweep.max_time", settings.max_time, time.time())

    def run(self) -> int:
        """Run jobs until nothing is left or a signal ends the sweep. Return the exit status."""
        self.terminal.print_opening()
        with handled_by(self._handle), contextlib.closing(self.terminal):
            try:
                self._run_jobs()
            except Exception:  # of the sweep itself: its jobs save and end
                self.running.terminate()
                self.running.wait(_POLL)
                print(self.terminal.how_to_continue, flush=True)
                raise
        if self.queue.trials:
            leaderboard.show(self.journal.path.parent)
        self.terminal.print_closing()

        states = self.queue.states
        has_undone = any(states[state] for state in _UNDONE)
        if self.stop or has_undone:
            print(self.terminal.how_to_continue, flush=True)
            return TO_BE_CONTINUED
        return 1 if states[TrialState.FAILED] else 0

    def _run_jobs(self) -> None:
        """Collect jobs that have ended and start new ones, until nothing runs and nothing more begins."""
        self._find_running()
        has_announced_stop = False
        while True:
            self._collect()
            has_begun = not self.stop and self._begin_next()

            # Announced here, since the signal handler must not print.
            if self.stop and not has_announced_stop:
                has_announced_stop = True
                self.terminal.announce_stop(self.stop)

            # A job may fail as it begins, and another may follow: look again at once.
            if not self.running and not has_begun:
                return
            self.terminal.show_progress()
            if not has_begun:
                time.sleep(_POLL)

    # Starting a job

    def _begin_next(self) -> bool:
        """Begin a job if a slot is free. Return whether there was one."""
        if not self.running.can_start or self.queue.has_failed_often:
            return False
        trial = self.queue.next_trial(is_idle=not self.running)
        if trial is None:
            return False
        self._begin(trial)
        return True

    def _begin(self, trial: Trial) -> None:
        """Start the trial's job; note why it cannot start; or put it back until another job has ended."""
        try:
            job = self.composer.job(trial.number, trial.values)
            self._require_unchanged(job)
        except UserError as error:
            return self._note_end(trial, outcome.refused(error))
        if not self.running.packs:
            return self._start(trial, job, self.running.free_slots()[0], None)

        need = self.running.memory_need(job)
        slot = self.running.fitting_slot(need)
        if slot is None or self.stop:  # planning takes seconds, in which a signal may come
            self.queue.put_first(trial)
            return self.running.wait_for_memory(trial, need)
        if need is not None and need.is_infeasible:
            size = f"{bytes_text(need.bytes)} of {bytes_text(need.device_bytes / SHARE)}"
            return self._note_end(trial, outcome.infeasible_by_plan(size))
        return self._start(trial, job, slot, need)

    def _require_unchanged(self, job: ComposedJob) -> None:
        """Raise UserError if configuration files have changed: the job would not be like those that have run."""
        digest_before = self.journal.digests.get(job.name)
        if digest_before == job.digest:
            return

        # The first job is recorded with its configuration, and so tells what has changed. Jobs without a digest, as of
        # a random sweep, are judged by it alone.
        first_values = tuple(self.journal.first_request["values"])
        first_job = self.composer.job(0, first_values)
        changes = self.journal.config_changes(first_job.config)
        if digest_before or changes:
            changes_text = "; ".join(changes) or "other files of this job"
            raise UserError(f"the configuration has changed since the sweep began: {changes_text}; change it back")

    def _start(self, trial: Trial, job: ComposedJob, slot: Slot, need: MemoryNeed | None) -> None:
        """Start a job in its slot. need: the memory that it needs, with `sweep.pack`; None: not known."""
        # A trial keeps its number of threads, on which results depend.
        threads = trial.threads
        if threads is None:
            threads = slot.threads
        folder = os.path.relpath(job.folder, self.composer.folder)
        self.journal.add("start", number=trial.number, threads=threads, folder=folder)

        self.queue.prepare_rungs(trial, job.folder, by_launcher=self.launcher is not None)
        self.terminal.announce_start(trial, job, slot)
        self.running.start(trial, job, slot, threads, need)
        if self.stop:  # a signal during the start
            self.running.by_trial[trial.number].job.terminate()

    # What has happened

    def _find_running(self) -> None:
        """Find the jobs that outlived an earlier process of this sweep; `_collect` resumes those that did not."""
        trials = [trial for trial in self.queue.trials if trial.state is TrialState.RUNNING]
        for trial in self.running.find_orphans(trials):
            self.terminal.print_line(f"job {trial.number} still runs")

    def _collect(self) -> None:
        """Answer the questions of jobs, and note which have ended. At the deadline, stop the sweep."""
        for running in list(self.running.by_trial.values()):
            status = running.job.poll()
            self.queue.answer_question(running.trial)  # also one asked just before it ended
            if status is None:
                continue
            self.running.remove(running)
            # A user who continues the run by hand asks no sweep.
            rungs_path = Path(running.trial.folder) / rungs.RUNGS
            rungs_path.unlink(missing_ok=True)
            self._finish(running, status)

        if not self.stop and time.monotonic() >= self._deadline:
            self._pass_on(TIME_IS_UP)

    def _finish(self, running: RunningJob, status: int) -> None:
        """Note the end of a job. One that was lost while the sweep keeps running is resumed, a few times."""
        trial = running.trial
        launcher_error = getattr(running.job, "error", "")
        end = outcome.judge(Path(trial.folder), self.mode, status, trial.is_held, launcher_error)
        if self.stop and end.state is TrialState.STOPPED:  # as asked, also where it had not begun to hear signals
            end = end._replace(error="")

        is_lost = outcome.was_lost(end, status) and not self.stop
        if is_lost and not self.queue.may_restart(trial, status):
            is_lost = False
            end = end._replace(state=TrialState.FAILED, error=f"{end.error}, {RETRIES + 1} times")

        self._note_end(trial, end)
        if is_lost:  # first of all, so that what comes next knows its result
            self.queue.put_first(trial)

    def _note_end(self, trial: Trial, end: Outcome) -> None:
        """Record how a trial has ended, print it, and copy it to the storage."""
        self.queue.record_end(trial, end)
        self.terminal.announce_end(trial)
        try:
            self.queue.copy_to_storage()
        except UserError as error:  # the jobs do not depend on it, and the next copy has all
            self.terminal.print_line(str(error))

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
        self.running.terminate()
        if is_second or self.launcher:
            exit_code = 128 + number if is_second else TO_BE_CONTINUED
            os.write(1, f"{self.terminal.how_to_continue}\n".encode())
            os._exit(exit_code)
