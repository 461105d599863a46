"""A run's progress, in steps, updates and samples."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cadence(NamedTuple):
    """The steps, numbered from 1, that have an update.

    These are the multiples of `every`, and the first step, so that its memory needs show at once. With an `offset`,
    they are the steps that are `offset` more than a multiple, and no others.
    """

    every: int = 1
    offset: int | None = None

    def includes(self, step_number: int) -> bool:
        """Return whether this step has the update."""
        if self.offset is None:
            return step_number == 1 or step_number % self.every == 0
        return step_number % self.every == self.offset % self.every

    @property
    def first_step(self) -> int:
        """The first step that has the update."""
        return next(filter(self.includes, itertools.count(1)))


EVERY_STEP = Cadence()


def update_after(update: int, step: int, cadences: Sequence[Cadence]) -> int | None:
    """Return the index of the update after `update` in the step after `step` finished ones; None if `update` is its
    last.

    Args:
        update: an index among the updates of a step.
        step: the number of finished steps.
        cadences: of each update; the first has every step.
    """
    for number in range(update + 1, len(cadences)):
        if cadences[number].includes(step + 1):
            return number
    return None


@dataclass
class Progress:
    """The run's progress. With the seed, `epoch` and `consumed` are the sampler's whole state."""

    step: int = 0  # applied optimizer steps
    epoch: int = 0
    consumed: int = 0  # samples trained in this epoch
    samples: int = 0  # trained in all epochs together
    skipped: int = 0  # steps skipped, for a value that was not finite or a count of 0
    evaluated_at: int = 0  # the step of the last evaluation, so that a restart does not repeat it
    objective: float | None = None  # value in the last evaluation
    best: float | None = None
    best_step: int | None = None
    stopped: str | None = None  # why the run ended early; None if it did not
    update: int = 0  # index of the current step's coming update; with one optimizer, a step has one
    applied: int = 0  # number of the step's finished updates that changed the parameters

    def finish_update(self, applied: bool, cadences: Sequence[Cadence]) -> bool:
        """Count an update of the step. Return whether it was the last, which finishes the step.

        A step counts as skipped if none of its updates was applied.

        Args:
            applied: whether the update changed the parameters.
            cadences: see `update_after`.
        """
        if applied:
            self.applied += 1
        next_update = update_after(self.update, self.step, cadences)
        if next_update is not None:
            self.update = next_update
            return False

        # The step is finished: count it, and begin the next one with its first update.
        if self.applied:
            self.step += 1
        else:
            self.skipped += 1
        self.update = 0
        self.applied = 0
        return True

    def begin_next_epoch(self) -> None:
        """Skip the rest of this epoch."""
        self.epoch += 1
        self.consumed = 0
