"""Which trials pass a rung: asynchronous successive halving (ASHA, Li et al. 2020, arXiv:1810.05934), Hyperband's
brackets of it (Li et al. 2018, arXiv:1603.06560), and the median rule (Golovin et al. 2017, Vizier).

A trial that does not pass is paused, not ended: it continues from its checkpoint when it is among the best of its rung
after all. Rung r of R is at eta**(r - R) of a whole run.
"""

import statistics
from collections.abc import Sequence

from trainapp.config.schema import Sweep
from trainapp.sweep.journal import Trial

_FEWEST = 4  # values of others before the median rule acts


class Pruner:
    """Decides by the trials' values at rungs. direction (in methods): max or min."""

    def __init__(self, settings: Sweep):
        self.kind, self.eta, self.count = settings.pruner, settings.eta, settings.rungs
        self._brackets = _brackets(self.eta, self.count) if self.kind == "hyperband" else [0]

    def bracket(self, trial: Trial) -> int:
        """The number of the trial's first rung: in Hyperband some trials skip the lower ones."""
        return self._brackets[trial.number % len(self._brackets)]

    def rungs(self, trial: Trial) -> list[tuple[int, float]]:
        """The rungs that lie before the trial, with the fraction of a run at which they are."""
        first = max([self.bracket(trial) - 1, *trial.reached]) + 1
        return [(rung, self.eta ** (rung - self.count)) for rung in range(first, self.count)]

    def passes(self, trial: Trial, rung: int, trials: Sequence[Trial], direction: str) -> bool:
        """Whether a trial that has just reached a rung continues at once."""
        if self.kind == "median":
            others = [_rank(one, rung, direction)[0] for one in trials if rung in one.reached and one is not trial]
            return len(others) < _FEWEST or _rank(trial, rung, direction)[0] <= statistics.median(others)
        return trial in self._best(rung, trials, self.bracket(trial), direction)

    def promotable(self, trials: Sequence[Trial], direction: str, is_last: bool = False) -> tuple[Trial, int] | None:
        """A paused trial that may continue, and the rung that it leaves: from the highest rung with one. is_last: no
        more trials begin, so that the best of each rung continues, however few they are.
        """
        for rung in reversed(range(self.count)) if self.kind != "median" else ():
            for first in sorted(set(self._brackets)):
                for one in self._best(rung, trials, first, direction, is_last):
                    if one.state == "paused" and one.is_held and rung == max(one.reached):
                        return one, rung
        return None

    def _best(
        self, rung: int, trials: Sequence[Trial], bracket: int, direction: str, is_last: bool = False
    ) -> list[Trial]:
        """Of those in the bracket that have reached the rung. is_last: at least one, which can reach the end."""
        rivals = [one for one in trials if rung in one.reached and self.bracket(one) == bracket]
        if is_last:
            rivals = [one for one in rivals if one.state not in ("failed", "infeasible")]
        count = max(len(rivals) // self.eta, int(is_last))
        return sorted(rivals, key=lambda one: _rank(one, rung, direction))[:count]


def _rank(trial: Trial, rung: int, direction: str) -> tuple[float, int]:
    """Smaller is better; nan is the worst, and of equal ones the later."""
    value = trial.reached[rung]
    return (float("inf") if value is None else -value if direction == "max" else value), trial.number


def _brackets(eta: int, rungs: int) -> list[int]:
    """The first rung of each trial, in turn: as many trials per bracket as give each about the same number of steps,
    evenly mixed.
    """
    places = []
    for first in range(rungs + 1):
        left = rungs - first
        count = -(-(rungs + 1) * eta**left // (left + 1))
        places += [((number + 0.5) / count, first) for number in range(count)]
    return [first for _, first in sorted(places)]
