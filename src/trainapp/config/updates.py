"""The rules of `updates`: several optimizers in a step, in turn."""

import re
from typing import TYPE_CHECKING

from trainapp.config.micro_schedule import is_by_update

if TYPE_CHECKING:
    from trainapp.config.schema import Config  # which builds on this module

_TAKEN = ("train", "batch", "memory", "lr", "micro")  # what other metrics and files are named by


def check_name(value: str) -> str:
    """The name of an update. Raises ValueError that states the rule."""
    if not re.fullmatch(r"[A-Za-z]\w*", value) or value.startswith("eval") or value in _TAKEN:
        raise ValueError(f"must be one word, by which its metrics are named, and none of eval..., {', '.join(_TAKEN)}")
    return value


def conflicts(config: "Config") -> list[str]:
    """Settings that cannot be combined with several optimizers."""
    errors = []
    names = [update.name for update in config.updates]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        errors.append(f"updates: {', '.join(twice)} is the name of several; give each a name of its own")
    if config.updates[0].every > 1:
        errors.append(
            f"updates.0.every={config.updates[0].every}: the first update is made in every step; put one with every=1 "
            "before it"
        )
    if config.optimizer.groups:
        errors.append(
            "optimizer.groups with updates: their patterns would be matched among the parameters of every update; give "
            "them in the optimizer of the update that they are for (updates: [{name: ..., optimizer: {groups: ...}}])"
        )
    schedule = config.batch.micro_schedule
    if schedule and (not is_by_update(schedule) or set(schedule) - set(names)):
        errors.append(
            f"batch.micro_schedule={schedule}: with updates, it gives the sizes of each by its name, such as "
            f"{{{names[0]}: {{1: 64, 30: 32}}}}; the names are {', '.join(names)}"
        )
    by_setting = {"optimizer": config.optimizer, **config.optimizers}
    in_backward = [setting for setting, optimizer in by_setting.items() if optimizer.in_backward]
    if in_backward:
        errors.append(
            f"{in_backward[0]}.in_backward=true with updates: the backward of one update passes through parameters of "
            "others, which it must not change; use in_backward=false"
        )
    if not config.oom.keep_global_batch:
        errors.append(
            "oom.keep_global_batch=false with updates: all updates of a step are on the same samples, of which a later "
            "one would then have fewer; use oom.keep_global_batch=true"
        )
    if config.activation_checkpointing.mode == "budget":
        errors.append(
            "activation_checkpointing=budget with updates: what fits a budget is chosen from one loss; use "
            "activation_checkpointing=full"
        )
    return errors
