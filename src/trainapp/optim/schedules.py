"""Learning-rate schedules: the rates of the coming update.

The built-in shapes and users' functions are pure functions of the number of applied optimizer steps. torch's schedulers
have a state, which is saved in checkpoints. A retried or skipped step advances neither.
"""

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainapp.config import schema, targets
from trainapp.config.arguments import as_yaml
from trainapp.config.excludes import NO_BEST, SET_OBJECTIVE
from trainapp.errors import UserError
from trainapp.units import RunLength, parse_duration, to_steps

Factor = Callable[[int], float]
Groups = list[dict[str, Any]]


class Schedule:
    """Sets the rates of an optimizer's groups, whose `initial_lr` is the configured rate. Calling it returns their
    factor: 1/w, 2/w, ..., 1 in `warmup` steps, then a function of the steps since.

    Attributes: `arguments`, those from the configuration for which a user's or torch's class or function was built.
    """

    follows_evaluations = False
    arguments: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, factor: Factor = lambda step: 1.0, warmup: int = 0):
        self._factor = factor
        self.warmup_steps = warmup

    def __call__(self, step: int) -> float:
        return self._warmup_factor(step) * self._factor(max(0, step - self.warmup_steps))

    def _warmup_factor(self, step: int) -> float:
        if not self.warmup_steps:
            return 1.0
        return min(1.0, (step + 1) / self.warmup_steps)

    def set_rates(self, groups: Groups, step: int) -> None:
        """Set the rates for the update that follows `step` applied steps."""
        factor = self(step)
        for group in groups:
            group["lr"] = group["initial_lr"] * factor

    def first_rates(self, groups: Groups) -> list[float]:
        """Return the rates of the run's first step."""
        factor = self(0)
        return [group["initial_lr"] * factor for group in groups]

    def record_objective(self, objective: float) -> None:
        """Record the objective of an evaluation, equal on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; none for a function of the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned."""


def for_optimizer(
    settings: schema.Schedule,
    run: RunLength,
    optimizer: torch.optim.Optimizer,
    user_packages: Sequence[str] = (),
    direction: str | None = "min",
) -> Schedule:
    """Return the schedule of an optimizer whose groups have an `initial_lr`.

    A target with a parameter `warmup` gets that key as it is written; otherwise the program adds a linear warm-up.

    Raises UserError as `build` does, and if `_target_` is not allowed, gets wrong arguments, is neither a function of
    the step nor one of torch's schedulers, or follows an objective without a direction.

    Args:
        settings: those of `schedule`, or of an update's own.
        run: the lengths that durations refer to.
        optimizer: whose groups' rates are scheduled.
        user_packages: packages that a `_target_` may name, beside the allowed ones.
        direction: "min" or "max", the objective's; None if no value of it is better than another.
    """
    if settings.target is None:
        return build(settings, run)

    # The warm-up is the target's own if it has a parameter for it.
    target = targets.locate(settings.target, "schedule._target_", user_packages)
    arguments = dict(settings.arguments)
    warmup = 0
    if "warmup" not in inspect.signature(target).parameters:
        duration = arguments.pop("warmup", settings.warmup)
        warmup = _warmup_steps(duration, run)

    settings = dataclasses.replace(settings, arguments=arguments)
    schedule = _of_target(target, settings, run, warmup, optimizer, user_packages, direction)
    schedule.arguments = arguments
    return schedule


def _warmup_steps(warmup: Any, run: RunLength) -> int:
    """Return the steps of a target's warm-up, which the schema has not checked. Raises UserError."""
    try:
        parse_duration(warmup)
    except ValueError as error:
        raise UserError(f"schedule.warmup={as_yaml(warmup)}: {error}") from None
    return to_steps("schedule.warmup", warmup, run)


def _of_target(
    target: Callable[..., Any],
    settings: schema.Schedule,
    run: RunLength,
    warmup: int,
    optimizer: torch.optim.Optimizer,
    user_packages: Sequence[str],
    direction: str | None,
) -> Schedule:
    """Return the schedule of a function of the step, or of one of torch's schedulers, after `warmup` steps."""
    name = str(settings.target)
    provided: dict[str, Any] = {"total_steps": run.total_steps}
    if "optimizer" not in inspect.signature(target).parameters:
        function = _function(target, settings, user_packages, provided)
        return Schedule(_checked(function, name), warmup)

    # One of torch's schedulers: one that follows the objective needs its direction, all need the optimizer.
    if inspect.isclass(target) and issubclass(target, ReduceLROnPlateau):
        if direction is None:
            raise UserError(f"schedule._target_={name} with objective=auto: {NO_BEST}; {SET_OBJECTIVE}")
        provided["mode"] = direction
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr")  # a scheduler sets its own `initial_lr`
    provided["optimizer"] = optimizer
    try:
        scheduler = targets.construct(target, settings.arguments, "schedule", user_packages, provided)
    except UserError as error:  # such as that a list has another length than the groups
        if len(optimizer.param_groups) == 1 or str(len(optimizer.param_groups)) not in str(error):
            raise
        raise UserError(
            f"{error}. The optimizer's groups are, in order: {_names_of(optimizer.param_groups)}"
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise UserError(
            f"schedule._target_={name}: with a parameter `optimizer`, it must be one of torch's schedulers or return "
            f"one, not a {type(scheduler).__name__}"
        )
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return TorchSchedule(scheduler, warmup)


def rebuild(
    schedule: Schedule,
    settings: schema.Schedule,
    run: RunLength,
    optimizer: torch.optim.Optimizer,
    user_packages: Sequence[str] = (),
    direction: str | None = "min",
) -> Schedule:
    """Return the schedule for another run length, with the state of the former one. Raises as `for_optimizer`."""
    state = schedule.state_dict()
    options_by_group = [_options(group, optimizer) for group in optimizer.param_groups]
    new_schedule = for_optimizer(settings, run, optimizer, user_packages, direction)
    if state:  # torch's, whose constructor has reset options, such as momentum, to their initial values
        for group, options in zip(optimizer.param_groups, options_by_group, strict=True):
            group.update(options)
        new_schedule.load_state_dict(state)
    return new_schedule


def _options(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of a group that the optimizer's class defines."""
    return {name: group[name] for name in optimizer.defaults if name in group}


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the learning rates as logged: `lr` for parameters in no group, `lr/NAME` for each group."""
    groups = optimizer.param_groups
    unnamed_groups = [group for group in groups if "label" not in group]
    main_group = unnamed_groups[0] if unnamed_groups else groups[0]
    rates_by_name = {"lr": main_group["lr"]}
    for group in groups:
        if "label" in group:
            rates_by_name[f"lr/{group['label']}"] = group["lr"]
    return rates_by_name


# --- functions of the step


def build(settings: schema.Schedule, run: RunLength) -> Schedule:
    """Return a schedule of a built-in shape. Raises UserError if warm-up and decay do not fit into the run."""
    # The lengths of warm-up and decay, which must fit into the run.
    total = run.total_steps
    final = settings.final
    warmup = to_steps("schedule.warmup", settings.warmup, run)
    decay = 0
    if settings.shape == "wsd":
        decay = to_steps("schedule.decay", settings.decay, run)
    _, unit_of_warmup = parse_duration(settings.warmup)
    _, unit_of_decay = parse_duration(settings.decay)
    if unit_of_warmup == unit_of_decay == "percent":
        decay = min(decay, max(0, total - warmup))  # each was rounded up to at least one step
    if warmup + decay > total:
        raise UserError(
            f"schedule.warmup={settings.warmup} ({warmup} steps) and decay ({decay} steps) exceed the run's {total} "
            "steps; make them shorter"
        )

    # In steps since the warm-up: `factor` falls from `start` to `length`.
    length = total - warmup
    start = length - decay if settings.shape == "wsd" else 0
    falling_steps = max(1, length - start)

    def factor(step: int) -> float:
        progress = (step - start) / falling_steps
        progress = min(1.0, max(0.0, progress))
        if settings.shape == "linear":
            fallen = progress
        elif settings.shape == "cosine":
            fallen = 0.5 * (1 - math.cos(math.pi * progress))
        elif settings.shape == "wsd":
            fallen = math.sqrt(progress)
        else:
            fallen = 0.0
        return 1 - (1 - final) * fallen  # from 1 to `final`

    return Schedule(factor, warmup)


def _function(
    target: Any, settings: schema.Schedule, user_packages: Sequence[str], provided: dict[str, Any]
) -> Callable[[int], Any]:
    """Return a function whose first parameter is the step, or an instance of a class that is called like that.

    Raises UserError for a target that is neither.
    """
    first_parameter = next(iter(inspect.signature(target).parameters), None)
    if inspect.isclass(target) or first_parameter not in (None, *settings.arguments):
        function: Any = targets.function_of(target, settings.arguments, "schedule", user_packages, 1, provided)
        if callable(function):
            return function
    raise UserError(
        f"schedule._target_={settings.target}: must be a function whose first parameter is the step and which returns "
        "the factor of the learning rate, a class whose instances are called like that, or have a parameter "
        "`optimizer` and return one of torch's schedulers"
    )


def _checked(function: Callable[[int], Any], name: str) -> Factor:
    """Return the function with a check: it raises UserError for a factor that is negative or not finite."""

    def factor(step: int) -> float:
        value = float(function(step))
        if not 0 <= value < math.inf:
            raise UserError(
                f"schedule._target_={name}: for step {step} it returned {value}; it must return the factor of the "
                "learning rate, a number of at least 0"
            )
        return value

    factor(0)  # reveals mistakes before the first step
    return factor


# --- torch's schedulers


def _names_of(groups: Sequence[dict[str, Any]]) -> str:
    """Return what tells groups apart, in their order: the patterns of `optimizer.groups`, the weight decay, the number
    of tensors.
    """
    names = []
    for group in groups:
        facts = [group.get("label", "no pattern")]
        if "weight_decay" in group:
            facts.append(f"weight_decay={group['weight_decay']}")
        facts.append(f"tensors: {len(group['params'])}")
        names.append(f"({', '.join(facts)})")
    return ", ".join(names)


class TorchSchedule(Schedule):
    """One of torch's schedulers, after a linear warm-up.

    A scheduler changes its optimizer whenever it is stepped: here only when an update is committed, once per step
    applied since the warm-up, so a rolled-back or skipped step does not advance it. ReduceLROnPlateau is stepped once
    per evaluation.
    """

    def __init__(self, scheduler: LRScheduler, warmup: int):
        super().__init__(warmup=warmup)
        self._scheduler = scheduler
        self._steps = 0  # of the scheduler, since the warm-up
        self._groups = scheduler.optimizer.param_groups
        self._rates = [group["lr"] for group in self._groups]  # the scheduler's rates, without the warm-up factor
        self._initial_rates = list(self._rates)
        self.follows_evaluations = isinstance(scheduler, ReduceLROnPlateau)

    def set_rates(self, groups: Groups, step: int) -> None:
        """Step the scheduler for the steps applied since the last call, and set the rates."""
        if not self.follows_evaluations:
            while self._steps < step - self.warmup_steps:
                self._step()
                self._steps += 1
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * self._warmup_factor(step)

    def first_rates(self, groups: Groups) -> list[float]:
        return [rate * self._warmup_factor(0) for rate in self._initial_rates]

    def record_objective(self, objective: float) -> None:
        if self.follows_evaluations:
            self._step(objective)

    def _step(self, *objective: float) -> None:
        """Step the scheduler. Raises UserError for its ValueError, such as that of OneCycleLR beyond its last step.

        Args:
            objective: of an evaluation, for ReduceLROnPlateau.
        """
        # A scheduler computes its next rates from those in the groups: put back its own, without the warm-up factor.
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            with warnings.catch_warnings():  # torch does not know of the steps before a resume
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
                self._scheduler.step(*objective)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"schedule: {error}") from error
        self._rates = [group["lr"] for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and rates. Other options that it sets are in the optimizer's state."""
        return {
            "scheduler": self._scheduler.state_dict(),
            "steps": self._steps,
            "rates": self._rates,
            "class": type(self._scheduler).__name__,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the state's rates. The scheduler's settings (its constructor's parameters) stay as configured.

        The state of another class of scheduler is ignored. Raises ValueError for another number of groups.
        """
        if state["class"] != type(self._scheduler).__name__:
            return
        saved_rates = state.get("rates", ())
        if len(saved_rates) != len(self._rates):
            raise ValueError(f"a schedule of {len(saved_rates)} parameter groups instead of {len(self._rates)}")

        # Keep this scheduler's own settings. `_schedule_phases` are OneCycleLR's, which follow from its length.
        parameters = inspect.signature(type(self._scheduler)).parameters
        names_of_settings = {"base_lrs", "_schedule_phases", *parameters} - {"last_epoch"}
        scheduler_state = dict(state["scheduler"])
        for name, value in self._scheduler.state_dict().items():
            if name in names_of_settings:
                scheduler_state[name] = value
        self._scheduler.load_state_dict(scheduler_state)
        self._steps = state["steps"]
        self._rates = list(saved_rates)
