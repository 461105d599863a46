"""`mode=lr_find`: the schedule and the callback of a learning-rate range test (Smith 2015, arXiv:1506.01186)."""

import csv
from pathlib import Path

from trainapp.config.validation import PositiveFloat, PositiveInt, Str
from trainapp.hooks.callbacks import View

KEEP = 0.9  # of the smoothed loss per step


def growing(step: int, minimum: PositiveFloat, maximum: PositiveFloat, steps: PositiveInt) -> float:
    """The rate after `step` steps as a share of `maximum`: exponential, from `minimum` to all of it in the last."""
    return float((minimum / maximum) ** (1 - step / (steps - 1)))


def smoothed(losses: list[float]) -> list[float]:
    """An exponential moving average of the losses, without its bias towards 0."""
    average, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        average = KEEP * average + (1 - KEEP) * loss
        found.append(average / (1 - KEEP**number))
    return found


class RangeTest:
    """Writes the loss of each step to `file`, as CSV, and stops where the smoothed loss is `diverges` times its lowest
    so far (of a negative one, as far above it). Needs `every.log=1`.
    """

    def __init__(self, file: Str, diverges: PositiveFloat):
        self.file, self.diverges = Path(file), diverges
        self.losses: list[float] = []

    def after_step(self, view: View) -> None:
        """Raises OSError where the file cannot be written."""
        is_first = not self.losses
        self.losses.append(view.logged["loss"])
        with self.file.open("w" if is_first else "a", newline="") as file:  # what a rebuilt run repeats is written anew
            csv.writer(file).writerow([view.step, view.logged["loss"]])
        curve = smoothed(self.losses)
        lowest = min(curve)
        if curve[-1] - lowest > (self.diverges - 1) * abs(lowest):
            view.stop("the loss diverges")


def read(file: Path) -> tuple[list[int], list[float]]:
    """Steps and losses that a `RangeTest` has written; empty without a finished step."""
    if not file.exists():
        return [], []
    with file.open(newline="") as lines:
        rows = [(int(step), float(loss)) for step, loss in csv.reader(lines)]
    return [step for step, _ in rows], [loss for _, loss in rows]
