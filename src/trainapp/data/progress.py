"""How far a run has got."""

from dataclasses import dataclass


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
    update: int = 0  # updates of the present step that are finished: with one optimizer, there is one per step
    applied: int = 0  # of those, how many changed the parameters

    def finish_update(self, applied: bool, updates: int) -> bool:
        """Count one of the step's `updates`. Returns whether it was the last, which finishes the step. A step counts as
        skipped if none of its updates was applied.
        """
        self.update, self.applied = self.update + 1, self.applied + applied
        if self.update < updates:
            return False
        self.step += self.applied > 0
        self.skipped += self.applied == 0
        self.update = self.applied = 0
        return True

    def begin_next_epoch(self) -> None:
        """Skip the rest of this epoch."""
        self.epoch, self.consumed = self.epoch + 1, 0
