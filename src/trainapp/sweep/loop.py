"""The loop of a sweep: starts jobs as slots become free, answers their questions at rungs, and writes the journal.

Whatever kills it, the same command continues it: finished trials stay, running ones are waited for, interrupted ones
resume from their checkpoints, and the rest is proposed as if nothing had happened.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainapp.config.schema import Config, Sweep
from trainapp.errors import OUT_OF_MEMORY, UserError
from trainapp.files import CHECKPOINTS, shown
from trainapp.hooks import rungs
from trainapp.signals import ECHO, TIME_IS_UP, TO_BE_CONTINUED, deadline_of, handled_by, how_to_quit, named
from trainapp.sweep import jobs, leaderboard, rows, samplers
from trainapp.sweep.composing import ComposedJob, Composer
from trainapp.sweep.jobs import MemoryNeed, Outcome
from trainapp.sweep.journal import Journal, Trial
from trainapp.sweep.running_jobs import RunningJob, RunningJobs
from trainapp.sweep.slots import SHARE, Slot
from trainapp.sweep.trial_queue import RETRIES, TrialQueue
from trainapp.tracking.terminal import is_live
from trainapp.units import bytes_text, plural

_POLL = 0.1  # seconds between looks at the running jobs
_SHOW_EVERY = 1.0  # seconds between two lines of progress


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
        self.terminal.print_closing()
        states = self.queue.states
        if self.stop or states["new"] or states["stopped"] or states["running"]:
            print(self.terminal.how_to_continue, flush=True)
            return TO_BE_CONTINUED
        return 1 if states["failed"] else 0

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
            message = "; ".join(str(error).splitlines())
            return self._note_end(trial, Outcome("failed", message, {}, error.kind))
        if not self.running.packs:
            return self._start(trial, job, self.running.free_slots()[0], None)

        need = self.running.memory_need(job)
        slot = self.running.fitting_slot(need)
        if slot is None or self.stop:  # planning takes seconds, in which a signal may come
            self.queue.put_first(trial)
            return self.running.wait_for_memory(trial, need)
        if need is not None and need.is_infeasible:
            size = f"{bytes_text(need.bytes)} of {bytes_text(need.device_bytes / SHARE)}"
            error_text = f"out of memory by its plan at micro-batch 1: it needs {size}"
            return self._note_end(trial, Outcome("infeasible", error_text, {}, OUT_OF_MEMORY))
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
        trials = [trial for trial in self.queue.trials if trial.state == "running"]
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
        outcome = jobs.outcome(trial, self.mode, status, launcher_error)
        if self.stop and outcome.state == "stopped":  # as asked, also where it had not begun to hear signals
            outcome = outcome._replace(error="")

        # Killed, or an orphan that has ended.
        is_lost = outcome.state == "stopped" and status < 0 and not self.stop
        if is_lost and not self.queue.may_restart(trial, status):
            is_lost = False
            outcome = outcome._replace(state="failed", error=f"{outcome.error}, {RETRIES + 1} times")

        self._note_end(trial, outcome)
        if is_lost:  # first of all, so that what comes next knows its result
            self.queue.put_first(trial)

    def _note_end(self, trial: Trial, outcome: Outcome) -> None:
        """Record how a trial has ended, print it, and copy it to the storage."""
        self.queue.record_end(trial, outcome)
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


class SweepTerminal:
    """What a sweep prints: its size at the start, a line per start and end of a job, progress, the table at its end."""

    def __init__(self, settings: Sweep, journal: Journal, queue: TrialQueue, running: RunningJobs, config: Config):
        """Prepare the line of progress.

        Args:
            settings: of the sweep.
            journal: of the sweep.
            queue: its trials.
            running: its running jobs.
            config: of the first job.
        """
        self.settings = settings
        self.journal = journal
        self.folder = journal.path.parent
        self.queue = queue
        self.running = running
        self.config = config
        self._progress_line = tqdm(bar_format="{desc}", disable=not is_live())
        self._shown_at = 0.0

    def close(self) -> None:
        """Leave the line of progress."""
        self._progress_line.close()

    def print_line(self, text: str) -> None:
        """Print a line, above the line of progress if there is one."""
        if self._progress_line.disable:
            print(text, flush=True)
        else:
            tqdm.write(text)

    @property
    def how_to_continue(self) -> str:
        """The command that continues the sweep, for a message."""
        return f"Continue with:\n  python -m trainapp continue {shown(self.folder)}"

    def print_opening(self) -> None:
        """Print what the sweep has to do, and what it has done."""
        # What there is to do: how many jobs, how many at a time, with which memory, where.
        parts = [f"sweep of {plural(self.queue.count, 'job')}", self._concurrency()]
        if not self.running.packs:
            memory_overrides = self.running.slots[0].memory_overrides(self.config)
            parts += [f"each with {override}" for override in memory_overrides]
        parts.append(f"in {shown(self.folder)}")
        text = ", ".join(parts)

        # What an earlier process of the sweep has done.
        for state, count in self.queue.states.items():
            text += f"; {count} {state}"
        print(text)

        dimensions = [f"  {dimension.key}: {dimension}" for dimension in self.queue.space.dimensions]
        print("\n".join(dimensions), flush=True)

    def _concurrency(self) -> str:
        """Return how many jobs run at a time, for a message."""
        slot_count = len(self.running.slots)
        number = slot_count if slot_count > 1 else "one"
        text = f"{number} at a time"
        if self.running.packs:
            text = f"at most {text}"
        return text

    def announce_start(self, trial: Trial, job: ComposedJob, slot: Slot) -> None:
        """Print that a job starts or continues, where, and with which settings."""
        verb = "continues" if (job.folder / CHECKPOINTS).exists() else "starts"
        text = f"job {trial.number} {verb}"
        if str(slot):
            text += f" on {slot}"
        swept_overrides = self.queue.space.swept_overrides(trial.values)
        if swept_overrides:
            text += f": {' '.join(swept_overrides).replace('+', '')}"
        self.print_line(text)

    def announce_end(self, trial: Trial) -> None:
        """Print how a trial has ended."""
        facts = trial.facts
        text = f"job {trial.number} {trial.state}"
        if trial.state in ("paused", "stopped") and "steps" in facts:
            text += f" at step {facts['steps']}"
        best = facts.get("best_objective")
        if best is not None:
            text += f", best {facts['metric']} {best:.4g} at step {facts['best_step']}"

        # A job that could not start has no output.
        if trial.error:
            text += f": {trial.error}"
            log = Path(trial.folder) / jobs.CONSOLE_LOG
            if trial.folder and log.exists():
                text += f"; see {shown(log)}"
        self.print_line(text)

    def show_progress(self) -> None:
        """Show the numbers of jobs by state, and the best value, on the terminal's last line."""
        if self._progress_line.disable or time.monotonic() - self._shown_at < _SHOW_EVERY:
            return
        self._shown_at = time.monotonic()
        states = self.queue.states
        shown_states = ("finished", "running", "paused", "failed")
        counts = [f"{states[name]} {name}" for name in shown_states if states[name]]
        text = f"{', '.join(counts)} of {self.queue.count}"

        # From the journal alone: the logs of all jobs would take long to read.
        trial_rows = rows.read_sweep(self.journal, is_live=False)
        best = leaderboard.best_text(trial_rows)
        if best:
            text += f"; best {best}"
        self._progress_line.set_description_str(text)

    def announce_stop(self, reason: int) -> None:
        """Print that the sweep stops, and what its jobs do. With a launcher it has left at once.

        reason: the signal, or TIME_IS_UP.
        """
        consequence = "the running jobs save and end"
        if reason == TIME_IS_UP:
            self.print_line(f"sweep.max_time: {consequence}")
        else:
            self.print_line(f"{named(reason)}: {consequence}; {how_to_quit(reason)}")

    def print_closing(self) -> None:
        """Print the table, and what the sweep has left undone."""
        states = self.queue.states
        begun_count = len(self.queue.trials)
        if begun_count:
            leaderboard.show(self.folder)

        # Why jobs are left, and how to run them.
        if self.queue.has_failed_often:
            print(f"sweep.max_failures={self.settings.max_failures}: no more jobs were started")
        if states["failed"]:
            print(f"{states['failed']} failed; sweep.retry_failed=true runs them again when the sweep is continued")
        if states["paused"]:
            print(f"{states['paused']} paused; `trainapp continue {shown(self.folder)}/NUMBER` trains one to its end")
        if self.queue.count > begun_count and self.settings.sampler != "grid":
            text = f"{self.queue.count - begun_count} jobs have not begun"
            if self.queue.is_exhausted:
                text = f"sweep.sampler: found no other configuration, and {text}"
            print(text)
