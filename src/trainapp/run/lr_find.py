"""`mode=lr_find`: a run with rising learning rates, and the rate that its losses suggest.

The run is an ordinary one with its own schedule and callback, in a temporary folder: only the curve is kept.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainapp.config.schema import Config, Every, Schedule, Stopping, Target
from trainapp.errors import NotFinite, TrainingStopped
from trainapp.files import METRICS, atomic_write, json_lines
from trainapp.hooks.callbacks import View
from trainapp.run import runner
from trainapp.validation import PositiveFloat, PositiveInt

PICTURE = "lr_find.png"
FEWEST = 3  # steps in which the loss must fall
SMOOTHING = 0.9  # decay of the loss's moving average per step


class Suggestion(NamedTuple):
    """Learning rates: where the smoothed loss falls most steeply, and where it is lowest."""

    steepest: float
    lowest: float

    @property
    def rate(self) -> float:
        """The smaller of the steepest descent's and a tenth of the lowest loss's."""
        return min(self.steepest, self.lowest / 10)


def run(config: Config) -> float:
    """Run the range test, draw its curve, print and return the suggested rate.

    Raises TrainingStopped if the loss never falls, and the errors of a run.
    """
    run_dir, settings = Path(config.run_dir), config.lr_find
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".lr_find-", dir=run_dir) as folder:
        why = "the loss diverges"
        try:
            runner.run(configured(config, folder))
        except NotFinite:
            why = "the loss or a gradient is not finite"
        steps = json_lines(Path(folder) / METRICS)
    rates = [settings.max * growing(own["step"] - 1, settings.min, settings.max, settings.steps) for own in steps]
    losses = [own["loss"] for own in steps]
    curve = smoothed(losses)
    found = suggestion(rates, curve)
    if losses:
        _draw(run_dir / PICTURE, rates, losses, curve, found)
    if found is None:
        raise TrainingStopped(
            f"mode=lr_find: the loss falls at no rate from lr_find.min={settings.min:g} on; begin lower, or look for a "
            "mistake in model or loss"
        )
    ended = f", where {why}" if len(steps) < settings.steps else ""
    still = "; the loss still falls at the highest rate, raise lr_find.max" if found.lowest == rates[-1] else ""
    print(
        f"{len(rates)} steps at learning rates from {rates[0]:.2g} to {rates[-1]:.2g}{ended}",
        f"steepest descent at {found.steepest:.2g}; lowest loss at {found.lowest:.2g}, a tenth of which is "
        f"{found.lowest / 10:.2g}{still}",
        f"{PICTURE} is in {run_dir}",
        f"optimizer.lr={found.rate:.2g}",
        sep="\n",
        flush=True,
    )
    return float(f"{found.rate:.2g}")


def configured(config: Config, folder: str) -> Config:
    """The configuration of the run in `folder`: the same steps, without evaluation, saving or callbacks."""
    settings, highest = config.lr_find, config.lr_find.max
    lr = config.optimizer.lr
    ratio = None if lr is None else highest / lr
    groups = [group | {"lr": group["lr"] * ratio} if "lr" in group else group for group in config.optimizer.groups]
    growth = {"minimum": settings.min, "maximum": highest, "steps": settings.steps}
    watching = Target("trainapp.run.lr_find.RangeTest", {"diverges": settings.diverges})
    changes: dict[str, Any] = {
        "run_dir": folder,
        "train": dataclasses.replace(
            config.train,
            max_steps=settings.steps,
            max_epochs=None,
            max_time=None,
            nonfinite="stop",
            ema=None,
            check_exactness=False,
        ),
        "optimizer": dataclasses.replace(config.optimizer, lr=highest, groups=groups),
        "schedule": Schedule(target="trainapp.run.lr_find.growing", arguments=growth),
        "every": Every(log=1, eval=None, save=None),
        "checkpointing": dataclasses.replace(config.checkpointing, resume="none", save=False),
        "stopping": Stopping(),
        "objective": "auto",
        "eval": {},
        "metrics": {},
        "tracker": {},
        "callbacks": {"lr_find": watching},
        "user_packages": [*config.user_packages, __name__],
    }
    return dataclasses.replace(config, **changes)


class RangeTest:
    """Ends a learning-rate range test (Smith 2015, arXiv:1506.01186) when the smoothed loss has risen above its minimum
    by `diverges` - 1 times the minimum's magnitude. Needs `every.log=1`.
    """

    def __init__(self, diverges: PositiveFloat):
        self.diverges = diverges
        self.losses: list[float] = []

    def after_step(self, view: View) -> None:
        self.losses.append(view.logged["loss"])
        curve = smoothed(self.losses)
        lowest = min(curve)
        if curve[-1] - lowest > (self.diverges - 1) * abs(lowest):
            view.stop("the loss diverges")


def smoothed(losses: list[float]) -> list[float]:
    """An exponential moving average of the losses, without its bias towards 0."""
    average, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        found.append(average / (1 - SMOOTHING**number))
    return found


def growing(step: int, minimum: PositiveFloat, maximum: PositiveFloat, steps: PositiveInt) -> float:
    """The schedule of the range test: the factor of `maximum` after `step` steps, growing exponentially from `minimum`
    to `maximum` in the last step.
    """
    return float((minimum / maximum) ** (1 - step / (steps - 1)))


def suggestion(rates: list[float], curve: list[float]) -> Suggestion | None:
    """Suggest rates from the smoothed losses; None if they do not fall."""
    end = int(np.argmin(curve)) if curve else 0
    if end < FEWEST:
        return None
    slopes = np.gradient(curve[: end + 1], np.log(rates[: end + 1]))
    first = min(len(curve) // 10, end - FEWEST)  # early averages hold few losses, and their noise has steep slopes
    return Suggestion(rates[first + int(np.argmin(slopes[first:]))], rates[end])


def _draw(path: Path, rates: list[float], losses: list[float], curve: list[float], found: Suggestion | None) -> None:
    from matplotlib.figure import Figure  # late: half a second

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rates, losses, color="C0", alpha=0.3, label="loss")
    axes.plot(rates, curve, color="C0", label="smoothed")
    if found is not None:
        axes.axvline(found.steepest, color="C1", linestyle="--", label=f"steepest descent, {found.steepest:.2g}")
        tenth = found.lowest / 10
        axes.axvline(tenth, color="C2", linestyle="--", label=f"a tenth of the lowest loss's, {tenth:.2g}")
    low, high = min(losses), max(curve)  # an exploding loss would flatten the rest
    margin = 0.05 * (high - low) or 1.0
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(low - margin, high + margin))
    axes.legend()
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png")
