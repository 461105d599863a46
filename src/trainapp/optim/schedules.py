"""Learning-rate schedules: which rates the coming update has.

The application's own shapes and functions of one's own are pure functions of the number of applied optimizer steps.
torch's schedulers have a state, which a checkpoint holds. Neither a retried nor a skipped step advances either.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from trainapp.config import schema, targets
from trainapp.config.durations import RunLength, parse, to_steps
from trainapp.errors import UserError
from trainapp.optim import torch_schedules

Factor = Callable[[int], float]
Groups = list[dict[str, Any]]


class Schedule(Protocol):
    """Sets the options of an optimizer's groups, whose `initial_lr` is the configured rate."""

    follows_evaluations: bool

    def set_rates(self, groups: Groups, step: int) -> None:
        """For the update that follows `step` applied steps."""

    def evaluated(self, objective: float) -> None:
        """An evaluation has this objective, the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values; empty for a function of the step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


class ByFactor:
    """Multiplies each group's configured rate by a function of the step. Calling it gives the factor."""

    follows_evaluations = False

    def __init__(self, factor: Factor):
        self._factor = factor

    def __call__(self, step: int) -> float:
        return self._factor(step)

    def set_rates(self, groups: Groups, step: int) -> None:
        """See `Schedule`."""
        factor = self._factor(step)
        for group in groups:
            group["lr"] = group["initial_lr"] * factor

    def evaluated(self, objective: float) -> None:
        """It follows no evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """None."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """None."""


def for_optimizer(
    settings: schema.Schedule,
    run: RunLength,
    optimizer: torch.optim.Optimizer,
    user_packages: Sequence[str] = (),
    direction: str = "min",
) -> Schedule:
    """The schedule of an optimizer whose groups have their `initial_lr`.

    direction: "min" or "max", of the objective that evaluations give. Raises UserError as `build` does, and for what
    `_target_` names: not allowed, wrong arguments, neither a function of the step nor one of torch's schedulers.
    """
    if settings.target is None:
        return ByFactor(build(settings, run))
    warmup, name = warmup_steps(settings, run), settings.target
    target = targets.locate(name, "schedule._target_", user_packages)
    provided: dict[str, Any] = {} if run.total_steps is None else {"total_steps": run.total_steps}
    if "optimizer" not in inspect.signature(target).parameters:
        return ByFactor(_checked(_function(target, settings, user_packages, provided), warmup, name))
    if torch_schedules.follows_evaluations(target):
        provided["mode"] = direction

    def make(stand_in: torch.optim.Optimizer) -> Any:
        return targets.construct(
            target, settings.arguments, "schedule", user_packages, provided | {"optimizer": stand_in}
        )

    return torch_schedules.TorchSchedule(make, optimizer, warmup, name)


def _function(
    target: Any, settings: schema.Schedule, user_packages: Sequence[str], provided: dict[str, Any]
) -> Callable[[int], Any]:
    """A function whose first parameter is the step, or an instance of a class that is called like that."""
    if inspect.isclass(target):
        built: Callable[[int], Any] = targets.construct(target, settings.arguments, "schedule", user_packages, provided)
        if not callable(built):
            raise UserError(
                f"schedule._target_={settings.target}: an instance of it cannot be called; give the class a method "
                "`__call__(self, step)` that returns the factor of the learning rate, or a parameter `optimizer`, as "
                "torch's schedulers have"
            )
        return built
    first = next(iter(inspect.signature(target).parameters), None)
    if first is None or first in settings.arguments:
        raise UserError(
            f"schedule._target_={settings.target}: its first parameter must be the step; it returns the factor of the "
            "learning rate. One of torch's schedulers is built by a function with a parameter `optimizer`"
        )
    options = targets.arguments_of(target, settings.arguments, "schedule", user_packages, provided | {first: 0})
    del options[first]
    return lambda step: target(step, **options)


def _checked(function: Callable[[int], Any], warmup: int, name: str) -> Factor:
    """The function, returning floats. Raises UserError for a value that is not a number of at least 0."""

    def factor(step: int) -> float:
        value = function(max(0, step - warmup))
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise UserError(
                f"schedule._target_={name}: for step {max(0, step - warmup)} it returned {value!r}; it must return the "
                "factor of the learning rate, a number of at least 0"
            )
        return number * min(1.0, (step + 1) / warmup) if warmup else number

    factor(0)  # a mistake in it shows before the first step
    return factor


def build(settings: schema.Schedule, run: RunLength) -> Factor:
    """`factor(step)`: multiplies the base learning rate in the step that follows `step` applied ones.

    All shapes rise linearly over `warmup` first: 1/w, 2/w, ..., 1. Raises UserError where the shape needs a run with
    an end and there is none, and for a warm-up and a decay that do not fit into the run.
    """
    warmup = warmup_steps(settings, run)
    try:
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


def warmup_steps(settings: schema.Schedule, run: RunLength) -> int:
    """Of the linear warm-up. Raises UserError where its duration does not fit the run."""
    try:
        return to_steps(settings.warmup, run)
    except ValueError as error:
        raise UserError(f"schedule: {error}") from None


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rates, as they are logged: `lr` of what is in no group, and `lr/NAME` of each group."""
    groups = optimizer.param_groups
    plain = next((group for group in groups if "label" not in group), groups[0])
    return {"lr": plain["lr"]} | {f"lr/{group['label']}": group["lr"] for group in groups if "label" in group}
