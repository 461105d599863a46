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
    run_dir = Path(config.run_dir)
    settings = config.lr_find
    logged_steps, end = _range_test(config, run_dir)

    # The losses over the rates. The record does not have these: they follow from the steps.
    losses = [line["loss"] for line in logged_steps]
    rates = []
    for line in logged_steps:
        factor = growing(line["step"] - 1, settings.min, settings.max, settings.steps)
        rates.append(settings.max * factor)

    # The picture comes before the error: it shows why there is no suggestion.
    curve = smoothed(losses)
    suggested = suggestion(rates, curve)
    if losses:
        _draw(run_dir / PICTURE, rates, losses, curve, suggested)
    if suggested is None:
        raise TrainingStopped(
            f"mode=lr_find: the loss falls at no rate from lr_find.min={settings.min:g} on; begin lower, or look for a "
            "mistake in model or loss"
        )
    _print_suggestion(suggested, rates, end, run_dir)
    return float(f"{suggested.rate:.2g}")


def _range_test(config: Config, run_dir: Path) -> tuple[list[dict[str, Any]], str]:
    """Train with rising rates. Return the line of each step in metrics.jsonl, and why the test ended before its last
    step, or "".
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".lr_find-", dir=run_dir) as folder:
        end = "the loss diverges"
        try:
            runner.run(configured(config, folder))
        except NotFinite:
            end = "the loss or a gradient is not finite"
        logged_steps = json_lines(Path(folder) / METRICS)
    if len(logged_steps) >= config.lr_find.steps:
        end = ""
    return logged_steps, end


def _print_suggestion(suggested: Suggestion, rates: list[float], end: str, run_dir: Path) -> None:
    """Print the suggested rate and what it is derived from.

    Args:
        suggested: the suggestion.
        rates: the learning rates of all steps.
        end: why the test ended before its last step, or "".
        run_dir: the directory with the picture.
    """
    steps = f"{len(rates)} steps at learning rates from {rates[0]:.2g} to {rates[-1]:.2g}"
    if end:
        steps += f", where {end}"
    tenth = suggested.lowest / 10
    derivation = (
        f"steepest descent at {suggested.steepest:.2g}; lowest loss at {suggested.lowest:.2g}, a tenth of which is "
        f"{tenth:.2g}"
    )
    if suggested.lowest == rates[-1]:
        derivation += "; the loss still falls at the highest rate, raise lr_find.max"
    picture = f"{PICTURE} is in {run_dir}"
    print(steps, derivation, picture, f"optimizer.lr={suggested.rate:.2g}", sep="\n", flush=True)


def configured(config: Config, folder: str) -> Config:
    """Return the configuration of the run in `folder`: the same steps, without evaluation, saving or callbacks."""
    settings = config.lr_find
    growth = {"minimum": settings.min, "maximum": settings.max, "steps": settings.steps}
    range_test = Target("trainapp.run.lr_find.RangeTest", {"diverges": settings.diverges})
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
        "optimizer": dataclasses.replace(config.optimizer, lr=settings.max, groups=_groups_at_highest_rate(config)),
        "schedule": Schedule(target="trainapp.run.lr_find.growing", arguments=growth),
        "every": Every(log=1, eval=None, save=None),
        "checkpointing": dataclasses.replace(config.checkpointing, resume="none", save=False),
        "stopping": Stopping(),
        "objective": "auto",
        "eval": {},
        "metrics": {},
        "tracker": {},
        "callbacks": {"lr_find": range_test},
        "user_packages": [*config.user_packages, __name__],
    }
    return dataclasses.replace(config, **changes)


def _groups_at_highest_rate(config: Config) -> list[dict[str, Any]]:
    """Return `optimizer.groups` with rates in the same ratio to `lr_find.max` as theirs to `optimizer.lr`."""
    groups = []
    for group in config.optimizer.groups:
        if "lr" in group:
            assert config.optimizer.lr is not None  # refused before
            group = group | {"lr": group["lr"] * (config.lr_find.max / config.optimizer.lr)}
        groups.append(group)
    return groups


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
        rise = curve[-1] - lowest
        if rise > (self.diverges - 1) * abs(lowest):
            view.stop("the loss diverges")


def smoothed(losses: list[float]) -> list[float]:
    """Return an exponential moving average of the losses, without its bias towards 0."""
    average = 0.0
    curve = []
    for number, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        total_weight = 1 - SMOOTHING**number  # of the losses so far; the rest is that of the initial 0
        curve.append(average / total_weight)
    return curve


def growing(step: int, minimum: PositiveFloat, maximum: PositiveFloat, steps: PositiveInt) -> float:
    """Return the factor of `maximum` after `step` steps of the range test, growing exponentially from `minimum` to
    `maximum` in the last step.
    """
    progress = step / (steps - 1)
    return float((minimum / maximum) ** (1 - progress))


def suggestion(rates: list[float], curve: list[float]) -> Suggestion | None:
    """Return the rates that the smoothed losses suggest; None if they do not fall."""
    if not curve:
        return None
    lowest = int(np.argmin(curve))
    if lowest < FEWEST:
        return None

    # The steepest descent before the lowest loss, without the beginning: early averages hold few losses, and their
    # noise has steep slopes.
    log_rates = np.log(rates[: lowest + 1])
    slopes = np.gradient(curve[: lowest + 1], log_rates)
    first = min(len(curve) // 10, lowest - FEWEST)
    steepest = first + int(np.argmin(slopes[first:]))
    return Suggestion(rates[steepest], rates[lowest])


def _draw(
    path: Path, rates: list[float], losses: list[float], curve: list[float], suggested: Suggestion | None
) -> None:
    """Draw the losses and their average over the rates."""
    from matplotlib.figure import Figure  # late: half a second

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rates, losses, color="C0", alpha=0.3, label="loss")
    axes.plot(rates, curve, color="C0", label="smoothed")

    # The two rates of which the smaller one is suggested.
    if suggested is not None:
        steepest = suggested.steepest
        axes.axvline(steepest, color="C1", linestyle="--", label=f"steepest descent, {steepest:.2g}")
        tenth = suggested.lowest / 10
        axes.axvline(tenth, color="C2", linestyle="--", label=f"a tenth of the lowest loss's, {tenth:.2g}")

    # Up to the highest average: an exploding loss would flatten the rest.
    low = min(losses)
    high = max(curve)
    margin = 0.05 * (high - low) or 1.0
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(low - margin, high + margin))
    axes.legend()
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png")
