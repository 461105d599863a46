"""The length of a run, and the intervals at which it logs, evaluates and saves."""

from dataclasses import dataclass

from trainapp.config.schema import Config
from trainapp.data.source import Progress, TrainBatches
from trainapp.errors import UserError
from trainapp.units import RunLength, parse_duration, to_steps


@dataclass
class Limits:
    """The run's length, and the intervals at which it logs, evaluates and saves, in optimizer steps; 0 is never.

    evaluate_epochs, save_epochs: interval in epochs, used if an epoch's length is unknown.
    """

    length: RunLength
    log: int
    evaluate: int
    save: int
    evaluate_epochs: int = 0
    save_epochs: int = 0

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates at all."""
        return self.evaluate > 0 or self.evaluate_epochs > 0

    @property
    def saves(self) -> bool:
        """Whether the run saves before its end."""
        return self.save > 0 or self.save_epochs > 0

    @classmethod
    def of(cls, config: Config, batches: TrainBatches, progress: Progress) -> "Limits":
        """The limits of a run at this position. Raises UserError for a duration that its length cannot express."""
        every, steps, length = config.every, {}, run_length(config, batches, progress)
        epochs = {"eval": _epochs(every.eval, length), "save": _epochs(every.save, length)}
        for name, value in {"log": every.log, "eval": every.eval, "save": every.save}.items():
            try:
                steps[name] = 0 if epochs.get(name) else to_steps(value, length)
            except ValueError as error:
                raise UserError(f"every.{name}: {error}") from None
        return cls(length, steps["log"], steps["eval"], steps["save"], epochs["eval"], epochs["save"])


def _epochs(value: int | str | None, length: RunLength) -> int:
    """A duration in whole epochs of unknown length; 0 for any other duration."""
    if value is None or length.steps_per_epoch is not None:
        return 0
    amount, unit = parse_duration(value)
    return int(amount) if unit == "epochs" and amount == int(amount) else 0


def run_length(config: Config, batches: TrainBatches, progress: Progress) -> RunLength:
    """The lengths that durations refer to: the steps so far plus those left.

    The same at every position unless the data or the global batch has changed: skipped steps also count.
    """
    train, steps_per_epoch = config.train, batches.steps_per_epoch
    rest = batches.steps_left(progress.consumed)
    ends = [] if train.max_steps is None else [train.max_steps]
    if train.max_epochs is not None and steps_per_epoch is not None and rest is not None:
        epochs = train.max_epochs - progress.epoch
        left = rest + (epochs - 1) * steps_per_epoch if epochs > 0 else 0
        ends.append(progress.step + progress.skipped + left)
    # mode=eval and mode=export take no step and need no end
    return RunLength(steps_per_epoch, batches.global_size, min(ends, default=1))
