"""The length of a run, in steps and in time, and the intervals at which it logs, evaluates and saves."""

from dataclasses import dataclass
from typing import NamedTuple

from trainapp.config.schema import Config, Train
from trainapp.data.progress import Progress
from trainapp.data.train_batches import TrainBatches
from trainapp.units import RunLength, parse_duration, parse_time, to_steps


class Interval(NamedTuple):
    """An interval in optimizer steps, in epochs where their length is unknown, or in seconds; 0 is never."""

    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, setting: str, value: int | str | None, length: RunLength) -> "Interval":
        """Return the interval of a setting; raises as `to_steps`."""
        seconds = parse_time(value)
        if seconds:
            return cls(seconds=seconds)
        if value is not None and length.steps_per_epoch is None:
            amount, unit = parse_duration(value)
            if unit == "epochs" and amount == int(amount):
                return cls(epochs=int(amount))
        return cls(to_steps(setting, value, length))

    def ends_at(self, progress: Progress) -> bool:
        """Return whether an interval ends at this position; see `Flags.save_is_due` for one in seconds."""
        epoch_has_ended = self.epochs > 0 and progress.consumed == 0 and progress.epoch % self.epochs == 0
        return epoch_has_ended or (self.steps > 0 and progress.step % self.steps == 0)


FIRST_LATER_CHECK = 16  # the first step in which the loss is compared again, see `trials.later_steps`
LATER_CHECK_FACTOR = 4  # between two such steps: so few that they cost nothing


def later_check_is_due(step: int) -> bool:
    """Return whether the loss is compared again in this step."""
    while step > FIRST_LATER_CHECK and step % LATER_CHECK_FACTOR == 0:
        step //= LATER_CHECK_FACTOR
    return step == FIRST_LATER_CHECK


@dataclass
class Limits:
    """The run's length, and the intervals at which it logs (in steps), evaluates and saves."""

    length: RunLength
    train: Train
    log: int
    evaluate: Interval
    save: Interval

    @classmethod
    def of(cls, config: Config, batches: TrainBatches, progress: Progress) -> "Limits":
        """Return the limits of a run at this position. Raises UserError for a duration that its length cannot
        express.
        """
        every = config.every
        length = run_length(config.train, batches, progress)
        return cls(
            length,
            config.train,
            log=to_steps("every.log", every.log, length),
            evaluate=Interval.of("every.eval", every.eval, length),
            save=Interval.of("every.save", every.save, length),
        )

    def evaluation_is_due(self, progress: Progress) -> bool:
        """Return whether `every.eval`, or the run's end, asks for an evaluation that is not yet done at this step."""
        if not any(self.evaluate) or progress.evaluated_at == progress.step:
            return False
        return self.evaluate.ends_at(progress) or self.is_finished(progress)

    def evaluation_is_scheduled(self, progress: Progress) -> bool:
        """Return whether `every.eval` asks for an evaluation at this step.

        Only these may change how training continues. If the check before the first step or the evaluation at the end
        did, the same run, started or extended differently, would train differently.
        """
        return progress.step > 0 and self.evaluate.ends_at(progress)

    def save_is_due(self, progress: Progress) -> bool:
        """Return whether `every.save` or a best evaluation asks for a checkpoint at this step."""
        if not any(self.save):
            return False
        return progress.best_step == progress.step or self.save.ends_at(progress) or self.is_finished(progress)

    def is_finished(self, progress: Progress) -> bool:
        """Return whether the run has reached its end, or a callback has ended it."""
        return progress.stopped is not None or self.end_at(progress.step, progress.epoch)

    def end_at(self, step: int, epoch: int) -> bool:
        """Return whether the run ends after this many steps and epochs."""
        max_steps = self.train.max_steps
        if max_steps is not None and step >= max_steps:
            return True
        max_epochs = self.train.max_epochs
        return max_epochs is not None and epoch >= max_epochs


def run_length(train: Train, batches: TrainBatches, progress: Progress) -> RunLength:
    """Return the lengths that durations refer to: the steps so far plus those left.

    They are the same at every position unless the data or the global batch has changed: skipped steps also count.
    """
    steps_left_in_epoch = batches.steps_left(progress.consumed)
    steps_per_epoch = batches.steps_left()

    # The run ends at the first of its limits.
    ends = []
    if train.max_steps is not None:
        ends.append(train.max_steps)
    if train.max_epochs is not None and steps_per_epoch is not None and steps_left_in_epoch is not None:
        epochs_left = train.max_epochs - progress.epoch  # the current one included
        steps_left = 0
        if epochs_left > 0:
            steps_left = steps_left_in_epoch + (epochs_left - 1) * steps_per_epoch
        ends.append(progress.step + progress.skipped + steps_left)

    total_steps = min(ends, default=1)  # mode=eval and mode=export take no step and need no end
    return RunLength(steps_per_epoch, batches.global_size, total_steps)
