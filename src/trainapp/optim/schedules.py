"""Learning-rate schedules: which rates the coming update has.

The application's own shapes and functions of one's own are pure functions of the number of applied optimizer steps.
torch's schedulers have a state, which a checkpoint holds. Neither a retried nor a skipped step advances either.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainapp.config import schema, targets
from trainapp.config.durations import RunLength, parse, to_steps
from trainapp.errors import UserError

Factor = Callable[[int], float]
Groups = list[dict[str, Any]]
_NOT_ITS = ("params", "initial_lr", "label")  # keys of a group that no scheduler may change


class Schedule:
    """Sets the options of an optimizer's groups, whose `initial_lr` is the configured rate.

    Here the rates, by a factor that is a function of the step. Calling it gives the factor.
    """

    follows_evaluations = False

    def __init__(self, factor: Factor = lambda step: 1.0):
        self._factor = factor

    def __call__(self, step: int) -> float:
        return self._factor(step)

    def set_rates(self, groups: Groups, step: int) -> None:
        """For the update that follows `step` applied steps."""
        factor = self._factor(step)
        for group in groups:
            group["lr"] = group["initial_lr"] * factor

    def evaluated(self, objective: float) -> None:
        """An evaluation has this objective, the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values; none of a function of the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


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
        return Schedule(build(settings, run))
    warmup, name = warmup_steps(settings, run), settings.target
    target = targets.locate(name, "schedule._target_", user_packages)
    provided: dict[str, Any] = {} if run.total_steps is None else {"total_steps": run.total_steps}
    if "optimizer" not in inspect.signature(target).parameters:
        return Schedule(_checked(_function(target, settings, user_packages, provided), warmup, name))
    if inspect.isclass(target) and issubclass(target, ReduceLROnPlateau):
        provided["mode"] = direction

    def make(stand_in: torch.optim.Optimizer) -> Any:
        return targets.construct(
            target, settings.arguments, "schedule", user_packages, provided | {"optimizer": stand_in}
        )

    return TorchSchedule(make, optimizer, warmup, name)


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rates, as they are logged: `lr` of what is in no group, and `lr/NAME` of each group."""
    groups = optimizer.param_groups
    plain = next((group for group in groups if "label" not in group), groups[0])
    return {"lr": plain["lr"]} | {f"lr/{group['label']}": group["lr"] for group in groups if "label" in group}


# --- functions of the step


def build(settings: schema.Schedule, run: RunLength) -> Factor:
    """`factor(step)`: multiplies the base learning rate in the step that follows `step` applied ones.

    All shapes rise linearly over `warmup` first: 1/w, 2/w, ..., 1. Raises UserError where the shape needs a run with
    an end and there is none, and for a warm-up and a decay that do not fit into the run.
    """
    total, final = run.total_steps, settings.final
    if total is None and settings.shape != "constant":
        raise UserError(f"schedule={settings.shape} needs a run whose end is known; set train.max_steps or max_epochs")
    warmup = warmup_steps(settings, run)
    decay = _steps(settings.decay, run) if settings.shape == "wsd" else 0
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
    return _steps(settings.warmup, run)


def _steps(duration: Any, run: RunLength) -> int:
    try:
        return to_steps(duration, run)
    except ValueError as error:
        raise UserError(f"schedule: {error}") from None


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


# --- torch's schedulers


class _StandIn(torch.optim.Optimizer):
    """An optimizer with the groups of another, at their configured rates, and without its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        groups = [
            {name: value for name, value in group.items() if name not in _NOT_ITS}
            | {"params": [nn.Parameter(torch.zeros(()))], "lr": group["initial_lr"]}
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))
        self.before = [dict(group) for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: schedulers warn where none comes before their own."""


class TorchSchedule(Schedule):
    """The schedule of what `make` builds for an optimizer. warmup: steps of a linear warm-up before it.

    A scheduler changes an optimizer whenever it is stepped. This one has a stand-in with the same groups, whose rates,
    and other options that the scheduler sets, are given to the optimizer when an update is committed: so a step that is
    rolled back or skipped does not advance it, and a warm-up can come before it. It is stepped once per applied step
    after the warm-up, or once per evaluation where it is a ReduceLROnPlateau.
    name: for messages. Raises UserError for what is no scheduler.
    """

    def __init__(
        self, make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer, warmup: int, name: str
    ):
        super().__init__()
        self._warmup, self._steps = warmup, 0
        self._initial = [group["initial_lr"] for group in optimizer.param_groups]
        self._stand_in = _StandIn(optimizer)
        self._set: set[str] = {"lr"}  # options that the scheduler has ever set; the others may be the optimizer's own
        with self._stepping():
            self._scheduler = make(self._stand_in)
        if not isinstance(self._scheduler, LRScheduler):
            raise UserError(
                f"schedule._target_={name}: with a parameter `optimizer`, it must be one of torch's schedulers or "
                f"return one, not a {type(self._scheduler).__name__}"
            )
        self.follows_evaluations = isinstance(self._scheduler, ReduceLROnPlateau)

    def set_rates(self, groups: Groups, step: int) -> None:
        """Steps the scheduler for the steps that were applied since the last call."""
        while not self.follows_evaluations and self._steps < step - self._warmup:
            with self._stepping():
                self._scheduler.step()
            self._steps += 1
        factor = (step + 1) / self._warmup if step < self._warmup else 1.0
        for group, own in zip(groups, self._stand_in.param_groups, strict=True):
            group.update({name: own[name] for name in self._set if name in group})
            group["lr"] = own["lr"] * factor

    def evaluated(self, objective: float) -> None:
        if self.follows_evaluations:
            with self._stepping():
                self._scheduler.step(objective)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Around a step of the scheduler: notes the options that it sets. Raises UserError for its ValueError, such as
        that of OneCycleLR beyond its last step.
        """
        self._stand_in.step()
        try:
            yield
        except ValueError as error:
            raise UserError(f"schedule: {error}") from error
        for own, before in zip(self._stand_in.param_groups, self._stand_in.before, strict=True):
            self._set |= {name for name in before if name not in _NOT_ITS and own[name] != before[name]}

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, and what it has set in the groups."""
        groups = [{name: own[name] for name in sorted(self._set)} for own in self._stand_in.param_groups]
        return {
            "scheduler": self._scheduler.state_dict(),
            "steps": self._steps,
            "groups": groups,
            "initial": self._initial,
            "class": type(self._scheduler).__name__,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue. The scheduler's settings, which are its constructor's parameters, stay those of the configuration;
        where `optimizer.lr` has changed since, the rates change in proportion. The state of another class of schedulers
        is ignored. Raises ValueError for another number of groups.
        """
        if state["class"] != type(self._scheduler).__name__:
            return
        if len(state["groups"]) != len(self._initial):
            raise ValueError(f"a schedule of {len(state['groups'])} parameter groups instead of {len(self._initial)}")
        configured = {"base_lrs", *inspect.signature(type(self._scheduler)).parameters} - {"last_epoch"}
        kept = {name: value for name, value in self._scheduler.state_dict().items() if name in configured}
        self._scheduler.load_state_dict(state["scheduler"] | kept)
        self._steps = state["steps"]
        for own, saved, before, now in zip(
            self._stand_in.param_groups, state["groups"], state["initial"], self._initial, strict=True
        ):
            own.update(saved)
            own["lr"] = saved["lr"] if before == now else now * (saved["lr"] / before)
            self._set |= saved.keys()
