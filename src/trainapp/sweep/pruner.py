"""Which trials pass a rung: asynchronous successive halving (ASHA, Li et al. 2020, arXiv:1810.05934), Hyperband's
brackets of it (Li et al. 2018, arXiv:1603.06560), and the median rule (Golovin et al. 2017, Vizier).

A trial that does not pass is paused, not ended: it continues from its checkpoint when it is among the best of its rung
after all. Rung r of R is at eta**(r - R) of a whole run.
"""

import math
import statistics
from collections.abc import Sequence

from trainapp.config.schema import Sweep
from trainapp.sweep.journal import Trial
from trainapp.sweep.outcome import TrialState

_FEWEST_FOR_MEDIAN = 4  # values of other trials before the median rule acts


class Pruner:
    """Decides by the trials' values at rungs which trials continue.

    direction (in methods): of the objective, max or min.
    """

    def __init__(self, settings: Sweep):
        self.kind = settings.pruner
        self.eta = settings.eta
        self.rung_count = settings.rungs
        self._brackets = [0]  # those that trials take in turn
        if self.kind == "hyperband":
            self._brackets = _mixed_brackets(self.eta, self.rung_count)

    def bracket(self, trial: Trial) -> int:
        """Return the trial's bracket, named by its first rung: in Hyperband some trials skip the lower ones."""
        return self._brackets[trial.number % len(self._brackets)]

    def rungs(self, trial: Trial) -> list[tuple[int, float]]:
        """Return the rungs ahead of the trial, each with the fraction of a run at which it is."""
        last_reached = max(trial.rung_values, default=-1)
        first = max(self.bracket(trial), last_reached + 1)
        return [(rung, self.eta ** (rung - self.rung_count)) for rung in range(first, self.rung_count)]

    def passes(self, trial: Trial, rung: int, trials: Sequence[Trial], direction: str) -> bool:
        """Return whether a trial that has just reached a rung continues at once."""
        if self.kind == "median":
            return _passes_median(trial, rung, trials, direction)
        return trial in self._best(rung, trials, self.bracket(trial), direction)

    def promotable(self, trials: Sequence[Trial], direction: str, is_last: bool = False) -> tuple[Trial, int] | None:
        """Return a paused trial that may continue, and the rung that it leaves: the highest rung that has one.

        Args:
            trials: all trials so far.
            direction: of the objective.
            is_last: whether no more trials begin, so that the best of each rung continues, however few they are.
        """
        if self.kind == "median":
            return None
        brackets = sorted(set(self._brackets))
        for rung in reversed(range(self.rung_count)):
            for bracket in brackets:
                for trial in self._best(rung, trials, bracket, direction, is_last):
                    if trial.state is TrialState.PAUSED and trial.is_held and rung == max(trial.rung_values):
                        return trial, rung
        return None

    def _best(
        self, rung: int, trials: Sequence[Trial], bracket: int, direction: str, is_last: bool = False
    ) -> list[Trial]:
        """Return the best of the trials in a bracket that have reached the rung, the best first: one in `eta`.

        If `is_last`, it is at least one, which can reach the end.
        """
        in_bracket = [trial for trial in trials if self.bracket(trial) == bracket]
        rivals = [trial for trial in in_bracket if rung in trial.rung_values]
        if is_last:
            rivals = [trial for trial in rivals if not trial.state.has_failed]
        ranked = sorted(rivals, key=lambda trial: _rank_key(trial, rung, direction))

        count = len(rivals) // self.eta
        if is_last:
            count = max(count, 1)
        return ranked[:count]


def _passes_median(trial: Trial, rung: int, trials: Sequence[Trial], direction: str) -> bool:
    """Return whether a trial is at least as good at a rung as the median of the other trials."""
    rivals = [rival for rival in trials if rung in rival.rung_values and rival is not trial]
    losses = [_loss(rival, rung, direction) for rival in rivals]
    if len(losses) < _FEWEST_FOR_MEDIAN:
        return True
    return _loss(trial, rung, direction) <= statistics.median(losses)


def _rank_key(trial: Trial, rung: int, direction: str) -> tuple[float, int]:
    """Return a trial's sort key at a rung: the better one is smaller and, of equal ones, the earlier."""
    return _loss(trial, rung, direction), trial.number


def _loss(trial: Trial, rung: int, direction: str) -> float:
    """Return a trial's value at a rung as one of which less is better; nan is the worst."""
    value = trial.rung_values[rung]
    if value is None:
        return math.inf
    return -value if direction == "max" else value


def _mixed_brackets(eta: int, rungs: int) -> list[int]:
    """Return the bracket of each trial, in turn: as many trials per bracket as give each about the same number of
    steps, evenly mixed.
    """
    placements = []  # the position of each trial in the mix, from 0 to 1, with its bracket
    for bracket in range(rungs + 1):
        # Trials that start at a lower rung end earlier on average, so their bracket gets more of them; rounded up.
        rungs_ahead = rungs - bracket
        count = -(-(rungs + 1) * eta**rungs_ahead // (rungs_ahead + 1))
        for number in range(count):
            position = (number + 0.5) / count
            placements.append((position, bracket))
    return [bracket for _, bracket in sorted(placements)]
