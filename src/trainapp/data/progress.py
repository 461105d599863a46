"""How far a run has got."""

from collections.abc import Sequence
from dataclasses import dataclass


def due_updates(step: int, every: Sequence[int]) -> list[int]:
    """The numbers of the updates that follow `step` finished steps: of each, `every` says in which steps it is made.

    The first step has all of them, so that whatever they need is seen at once.
    """
    return [number for number, own in enumerate(every) if step == 0 or (step + 1) % own == 0]


@dataclass
class Progress:
    """The run's progress. With the seed, `epoch` and `consumed` are the sampler's whole state."""

    step: int = 0  # applied optimizer steps
    epoch: int = 0
    consumed: int = 0  # samples trained in this epoch
    samples: int = 0  # trained in all epochs together
    skipped: int = 0  # steps skipped for a non-finite loss or gradient
    evaluated_at: int = 0  # the step of the last evaluation, so that a restart does not repeat it
    objective: float | None = None  # of the last evaluation
    best: float | None = None
    best_step: int | None = None
    stopped: str | None = None  # why the run has ended before its length; None if it has not
    update: int = 0  # the number of the present step's coming update: with one optimizer, there is one per step
    applied: int = 0  # of those before it, how many changed the parameters

    def finish_update(self, applied: bool, every: Sequence[int]) -> bool:
        """Count an update of the step, see `due_updates`. Returns whether it was the last, which finishes the step. A
        step counts as skipped if none of its updates was applied.
        """
        self.applied += applied
        later = [number for number in due_updates(self.step, every) if number > self.update]
        if later:
            self.update = later[0]
            return False
        self.step += self.applied > 0
        self.skipped += self.applied == 0
        self.update = self.applied = 0
        return True

    def begin_next_epoch(self) -> None:
        """Skip the rest of this epoch."""
        self.epoch, self.consumed = self.epoch + 1, 0
