"""How long a run is, and how often it logs, evaluates and saves."""

from dataclasses import dataclass

from trainapp.config.durations import RunLength, to_steps
from trainapp.config.schema import Config
from trainapp.data.progress import Progress
from trainapp.data.sampler import TrainBatches


@dataclass
class Cadences:
    """How often, in optimizer steps; 0 is never."""

    log: int
    evaluate: int
    save: int

    @classmethod
    def of(cls, config: Config, length: RunLength) -> "Cadences":
        """From `every.*`. Raises ValueError for a percentage of a run without an end."""
        every = config.every
        return cls(to_steps(every.log, length), to_steps(every.eval, length), to_steps(every.save, length))


def run_length(config: Config, batches: TrainBatches, progress: Progress) -> RunLength:
    """What durations are measured against: the steps so far, and those from here to the end.

    Where neither data nor global batch have changed, that is the same at every position: skipped steps count, too.
    """
    train, steps_per_epoch = config.train, batches.steps_per_epoch
    ends = [] if train.max_steps is None else [train.max_steps]
    if train.max_epochs is not None:
        epochs = train.max_epochs - progress.epoch
        left = batches.steps_left(progress.consumed) + (epochs - 1) * steps_per_epoch if epochs > 0 else 0
        ends.append(progress.step + progress.skipped + left)
    # mode=eval and mode=export take no step and need no end
    return RunLength(steps_per_epoch, batches.global_size, min(ends, default=1))
