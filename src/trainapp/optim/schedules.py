"""Learning-rate schedules: pure functions of the number of applied optimizer steps, so there is no state to save."""

import math
from collections.abc import Callable

from trainapp.config import schema
from trainapp.config.durations import RunLength, parse, to_steps
from trainapp.errors import UserError

Schedule = Callable[[int], float]


def build(settings: schema.Schedule, run: RunLength) -> Schedule:
    """`factor(step)`: multiplies the base learning rate in the step that follows `step` applied ones.

    All shapes rise linearly over `warmup` first: 1/w, 2/w, ..., 1. Raises UserError where the shape needs a run with
    an end and there is none, and for a warm-up and a decay that do not fit into the run.
    """
    try:
        warmup = to_steps(settings.warmup, run)
        decay = to_steps(settings.decay, run) if settings.shape == "wsd" else 0
    except ValueError as error:
        raise UserError(f"schedule: {error}") from None
    total, final = run.total_steps, settings.final
    if total is None and settings.shape != "constant":
        raise UserError(f"schedule={settings.shape} needs a run whose end is known; set train.max_steps or max_epochs")
    if total is not None and parse(settings.warmup)[1] == parse(settings.decay)[1] == "percent":
        decay = min(decay, max(0, total - warmup))  # each was rounded up to at least one step
    if total is not None and warmup + decay > total:
        raise UserError(
            f"schedule.warmup={settings.warmup} ({warmup} steps) and decay ({decay} steps) exceed the run's {total} "
            "steps; make them shorter"
        )

    end = total or 0  # a constant rate does not use it

    def progress(step: int, start: int) -> float:
        return min(1.0, max(0.0, (step - start) / max(1, end - start)))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if settings.shape == "linear":
            return 1 - (1 - final) * progress(step, warmup)
        if settings.shape == "cosine":
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress(step, warmup)))
        if settings.shape == "wsd":
            return 1 - (1 - final) * math.sqrt(progress(step, end - decay))
        return 1.0

    return factor
