"""One notation for every duration: a number of steps, `2 epochs`, `10000 samples` or `5 percent` (of the run).

All are converted to steps once, at the start, by one helper (big_vision's idea).
"""

import math
import re
from dataclasses import dataclass

UNITS = ("steps", "epochs", "samples", "percent")
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")


@dataclass(frozen=True)
class RunLength:
    """The lengths that durations refer to. `total_steps` is None if the run's end is not known in steps,
    `steps_per_epoch` for a stream.
    """

    steps_per_epoch: int | None
    global_size: int
    total_steps: int | None


def parse(value: int | str) -> tuple[float, str]:
    """`(amount, unit)` of a duration. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        amount, unit = float(value), "steps"
    else:
        match = _PATTERN.fullmatch(str(value))
        unit = match[2] if match else "none"
        unit = {"epoch": "epochs", "": "steps", "step": "steps", "sample": "samples"}.get(unit, unit)
        if not match or unit not in UNITS:
            raise ValueError("must be a number of steps, or like '2 epochs', '10000 samples', '5 percent'")
        amount = float(match[1])
    if amount < 0:
        raise ValueError("must not be negative")
    if unit == "percent" and amount > 100:
        raise ValueError("must be at most 100 percent")
    return amount, unit


def to_steps(value: int | str | None, run: RunLength) -> int:
    """A duration in optimizer steps, rounded to the nearest, at least 1 unless it is zero. None gives 0: never."""
    if value is None:
        return 0
    amount, unit = parse(value)
    if unit == "percent":
        if run.total_steps is None:
            raise ValueError(f"{value} needs a run whose end is known: set train.max_steps or train.max_epochs")
        steps = amount / 100 * run.total_steps
    elif unit == "epochs":
        if run.steps_per_epoch is None:
            raise ValueError(f"{value} needs epochs of known length, which a stream lacks: use steps or samples")
        steps = amount * run.steps_per_epoch
    elif unit == "samples":
        steps = amount / run.global_size
    else:
        steps = amount
    return max(1, math.floor(steps + 0.5)) if amount > 0 else 0
