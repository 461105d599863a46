"""Refuses schedules under which parameter groups lose their own rates.

Some of torch's schedulers, such as OneCycleLR and CyclicLR, replace the rates of all groups by their own arguments.
What `optimizer.layer_decay` and `optimizer.groups` say of rates then has no effect. Which schedulers do so is found by
stepping them, since a scheduler may be the user's, or inside another.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from trainapp.config import targets
from trainapp.config.durations import RunLength
from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.optim import schedules

_STEPS = 1000  # that are looked at before a schedule is refused, up to a second; one mostly tells that it is right


def require_own_rates(
    config: Config, run: RunLength, optimizers: Sequence[torch.optim.Optimizer], direction: str = "min"
) -> None:
    """Call before the first step, with the optimizers in the order of `config.optimizers`.

    Raises UserError where groups of different rates, of one optimizer or of several, have the same rate in each of the
    first 1000 steps. Rates of 0 tell nothing, as at the start of a warm-up. Rates that differ in any step are as asked
    for, such as those of a list with one value per group.
    """
    if config.schedule.target is None:  # a factor
        return
    by_setting = dict(zip(config.optimizers, optimizers, strict=True))
    each = [{setting: optimizer} for setting, optimizer in by_setting.items()]
    for chosen in [*each, by_setting] if len(each) > 1 else each:
        own = [group["initial_lr"] for optimizer in chosen.values() for group in optimizer.param_groups]
        if _are_equal(own):
            continue
        rate = _common_rate(config, run, list(chosen.values()), direction)
        if rate is not None:
            raise UserError(_message(config, chosen, rate))


def _common_rate(
    config: Config, run: RunLength, optimizers: Sequence[torch.optim.Optimizer], direction: str
) -> float | None:
    """The rate of all groups in the first step that has one; None where groups have different rates in some step.

    Builds schedules of its own: they are stepped.
    """
    tried = [
        schedules.for_optimizer(config.schedule, run, optimizer, config.user_packages, direction)
        for optimizer in optimizers
    ]
    copies = [[{"lr": 0.0, "initial_lr": group["initial_lr"]} for group in o.param_groups] for o in optimizers]
    first = schedules.warmup_steps(config.schedule, run)
    end = first + _STEPS if run.total_steps is None else max(first + 1, min(first + _STEPS, run.total_steps))
    common = None
    for step in range(first, end):
        try:
            for schedule, groups in zip(tried, copies, strict=True):
                schedule.set_rates(groups, step)
        except UserError:  # it has an end before the run's, which its own step reports
            break
        rates = [float(group["lr"]) for groups in copies for group in groups]
        if not _are_equal(rates):
            return None
        common = common or rates[0]
    return common or None


def _are_equal(rates: Sequence[float]) -> bool:
    return all(math.isclose(rate, rates[0], rel_tol=1e-9) for rate in rates)


def _message(config: Config, optimizers: dict[str, torch.optim.Optimizer], rate: float) -> str:
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    several = len(optimizers) > 1
    labels = [
        f"{setting + ' ' if several else ''}{group.get('label', 'the rest')} {group['initial_lr']:.6g}"
        for setting, optimizer in optimizers.items()
        for group in optimizer.param_groups
    ]
    causes = " and ".join(_settings_of_rates(config, list(optimizers))) or "the optimizer's class"
    lists = [] if several else [f"schedule.{name}=[...]" for name in _that_take_lists(config)]
    per_group = f"; use {' and '.join(lists)} with {len(groups)} rates, one per group in this order" if lists else ""
    return (
        f"schedule._target_={config.schedule.target}: it gives all parameter groups the same rate ({rate:.6g} at "
        f"first), so that those of {causes} have no effect ({', '.join(labels)}){per_group}; "
        f"{'or ' if lists else 'use '}a schedule that multiplies the rates, such as schedule=cosine, or leave out "
        "the different rates"
    )


def _settings_of_rates(config: Config, settings: Sequence[str]) -> list[str]:
    """Which settings give parameters rates of their own."""
    found = []
    for setting in settings:
        own = config.optimizers[setting]
        if len(settings) > 1 and own.lr is not None:
            found.append(f"{setting}.lr={own.lr:g}")
        if own.layer_decay is not None:
            found.append(f"{setting}.layer_decay={own.layer_decay:g}")
        if any("lr" in group for group in own.groups):
            found.append(f"{setting}.groups")
    return found


def _that_take_lists(config: Config) -> list[str]:
    """The given arguments of the scheduler that are rates and may be lists, as their annotations say."""
    target: Any = targets.locate(str(config.schedule.target), "schedule._target_", config.user_packages)
    parameters = inspect.signature(target).parameters
    return [
        name
        for name in config.schedule.arguments
        if "lr" in name and name in parameters and "list" in str(parameters[name].annotation).lower()
    ]
