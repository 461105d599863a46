"""The trials of a sweep: which one comes next, which may pass a rung, and how each has ended.

Everything that must outlive the process is in the journal; the rest follows from it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trainapp.config.schema import Sweep
from trainapp.errors import UserError
from trainapp.files import json_object
from trainapp.hooks import rungs
from trainapp.sweep import samplers
from trainapp.sweep.journal import Journal, Trial, objectives_of
from trainapp.sweep.outcome import NOT_OUR_CHILD, Outcome, TrialState
from trainapp.sweep.pruner import Pruner
from trainapp.sweep.space import Space

RETRIES = 3  # of a job that was killed, as by a machine without memory, before it has failed


class TrialQueue:
    """The trials, those to begin first: interrupted ones, then promoted ones, then new ones."""

    def __init__(self, settings: Sweep, space: Space, propose: samplers.Propose, journal: Journal):
        """Prepare the queue.

        Args:
            settings: of the sweep.
            space: the search space.
            propose: proposes the configurations of new trials.
            journal: of the sweep; it has recorded what was asked for.
        """
        self.settings = settings
        self.space = space
        self.propose = propose
        self.journal = journal
        self.pruner = Pruner(settings) if settings.pruner != "none" else None
        self.is_exhausted = False  # whether the sampler has found no other configuration
        self._to_resume = _trials_to_resume(journal.trials, settings.retry_failed)
        self._kills: Counter[int] = Counter()  # by trial, in this process of the sweep

    @property
    def trials(self) -> list[Trial]:
        """All trials so far."""
        return self.journal.trials

    @property
    def count(self) -> int:
        """The number of jobs that the sweep has; of an endless space, `sweep.trials`."""
        most = self.settings.trials or math.inf
        return int(min(self.space.size, most))

    @property
    def states(self) -> Counter[TrialState]:
        """The number of trials in each state."""
        return Counter(trial.state for trial in self.trials)

    @property
    def has_failed_often(self) -> bool:
        """Whether `sweep.max_failures` is reached."""
        most = self.settings.max_failures
        return most is not None and self.states[TrialState.FAILED] >= most

    @property
    def direction(self) -> str:
        """The direction of the objective, max or min; empty while no trial has one.

        Raises UserError if trials differ where they are compared.
        """
        objectives = objectives_of(self.journal.facts)
        compares_trials = self.pruner is not None or self.settings.sampler != "grid"
        if len(objectives) > 1 and compares_trials:
            texts = [f"{metric} {direction}" for metric, direction in sorted(objectives)]
            raise UserError(
                f"objective: jobs have different ones ({', '.join(texts)}), which cannot be compared; set objective"
            )
        if len(objectives) != 1:
            return ""
        _, direction = objectives.pop()
        return direction

    # What comes next

    def next_trial(self, is_idle: bool) -> Trial | None:
        """Return the trial to begin or to continue, None if there is none for now. is_idle: whether no job runs."""
        if self._to_resume:
            return self._to_resume.pop(0)
        trial = self._promote()
        if trial is not None:
            return trial
        trial = self._propose_trial()
        if trial is not None:
            return trial

        # No new trials begin. Once no job runs, the best of each rung continues, however few rivals it has.
        self.is_exhausted = True
        if is_idle:
            return self._promote(is_last=True)
        return None

    def put_first(self, trial: Trial) -> None:
        """Make a trial the next one."""
        self._to_resume.insert(0, trial)

    def _promote(self, is_last: bool = False) -> Trial | None:
        """Promote a paused trial and return it; None if there is none. is_last: see `Pruner.promotable`."""
        if self.pruner is None:
            return None
        promotion = self.pruner.promotable(self.trials, self.direction, is_last)
        if promotion is None:
            return None
        trial, rung = promotion
        self.journal.add("promote", number=trial.number, rung=rung)
        return trial

    def _propose_trial(self) -> Trial | None:
        """Add a new trial to the journal and return it; None if no configuration is left."""
        number = len(self.trials)
        most = self.settings.trials or math.inf
        if self.is_exhausted or number >= most:
            return None
        proposal = self.propose(number, self.trials, self.direction)
        if proposal is None:
            return None
        values, attributes = proposal
        self.journal.add("trial", number=number, values=values, attributes=attributes)
        return self.trials[number]

    # Rungs

    def prepare_rungs(self, trial: Trial, folder: Path, by_launcher: bool) -> None:
        """Write the rungs ahead of a trial for its run, and remove what is left of earlier questions.

        Args:
            trial: that is about to start.
            folder: of its run.
            by_launcher: whether a launcher of Hydra starts it.
        """
        for name in (rungs.ASKS, rungs.ANSWERS, rungs.RUNGS):
            (folder / name).unlink(missing_ok=True)
        if self.pruner is None:
            return
        rungs_ahead = self.pruner.rungs(trial)
        if rungs_ahead:
            folder.mkdir(parents=True, exist_ok=True)
            content = {"rungs": rungs_ahead, "launched": by_launcher}
            rungs.write(folder / rungs.RUNGS, content)

    def answer_question(self, trial: Trial) -> None:
        """Answer the question of a trial's run at a rung, if it has asked one."""
        if self.pruner is None:
            return
        folder = Path(trial.folder)
        question = json_object(folder / rungs.ASKS)
        if not question:
            return

        # The journal may already have the question: a sweep can be killed before it answers.
        rung = question["rung"]
        if rung not in trial.rung_values:
            self.journal.add("rung", number=trial.number, **question)
        if trial.is_held and self.pruner.passes(trial, rung, self.trials, self.direction):
            self.journal.add("promote", number=trial.number, rung=rung)

        passes = rung in trial.passed_rungs
        rungs.write(folder / rungs.ANSWERS, {"rung": rung, "passes": passes})
        (folder / rungs.ASKS).unlink()

    # How trials end

    def may_restart(self, trial: Trial, status: int) -> bool:
        """Count the end of a job that was lost. Return whether it may restart: one that was killed may a few times.

        Args:
            trial: of the job.
            status: the job's exit status.
        """
        if status != NOT_OUR_CHILD:
            self._kills[trial.number] += 1
        return self._kills[trial.number] <= RETRIES

    def record_end(self, trial: Trial, end: Outcome) -> None:
        """Record in the journal how a trial has ended."""
        fields = end._asdict()
        if not end.error_kind:
            del fields["error_kind"]
        self.journal.add("end", number=trial.number, **fields)

    def copy_to_storage(self) -> None:
        """Copy the trials to `sweep.storage`, if there is one. Raises UserError if it cannot be written."""
        storage = self.settings.storage
        if storage and self.direction:
            folder = str(self.journal.path.parent)
            samplers.copy_to_storage(storage, folder, self.space, self.trials, self.direction)


def _trials_to_resume(trials: Sequence[Trial], retry_failed: bool) -> list[Trial]:
    """Return the trials that an earlier process of the sweep has left to do."""
    trials_to_resume = []
    for trial in trials:
        is_undone = trial.state in (TrialState.NEW, TrialState.STOPPED)
        was_promoted = trial.state is TrialState.PAUSED and not trial.is_held  # and then killed
        is_retried = retry_failed and trial.state.has_failed
        if is_undone or was_promoted or is_retried:
            trials_to_resume.append(trial)
    return trials_to_resume
