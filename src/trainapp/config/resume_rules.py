"""Which settings a run must keep when it continues in its directory, and which may change. Imports no torch.

Another model, data, optimizer, seed or global batch makes another experiment, whose result would be mistaken for this
one's. Where, how and how long the run computes, and what it logs, may change at any time. In a new directory, with
`checkpointing.resume=RUN`, everything may.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from trainapp.files import strict_json

# Sections and settings, as users write them. A section includes all its settings and constructor arguments.
_MUST_MATCH = (
    "task",
    "updates",
    "objective",
    "data",
    "model",
    "adapter",
    "optimizer",
    "schedule",
    "precision.mode",
    "train.seed",
    "train.grad_clip",
    "train.ema",
    "batch.global_size",
)
# Settings of those sections that affect only how the result is computed, or what a recovery changes.
_MAY_CHANGE = (
    "data.num_workers",
    "data.on_change",
    "data.on_error",
    "optimizer.fused",
    "optimizer.foreach",
    "optimizer.capturable",
    "optimizer.in_backward",
    "optimizer.offload",
)
# Filled in by the program, or irrelevant for the run that continues.
_NOT_COMPARED = (
    "run_dir",
    "command",
    "given",
    "started",
    "sweeper_direction",
    "mode",
    "sweep",
    "user_packages",
    "checkpointing.resume",
)
_AS_WRITTEN = {"target": "_target_", "task_arguments": "task"}
# Settings that runs of earlier versions lack, with their defaults: equal to a missing one.
_DEFAULT_OF_LATER = {"oom.techniques": "same"}
_UNSET = "not set"  # an argument that one of two configurations does not name


class Change(NamedTuple):
    """A setting with its values before and now, as a user writes them."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} before, {self.now} now"

    @property
    def is_another_experiment(self) -> bool:
        """Whether a run may not change it in its directory."""
        return is_of_experiment(self.name)


def is_of_experiment(name: str) -> bool:
    """Return whether a setting is one of those that a run may not change."""
    return is_within(name, _MUST_MATCH) and not name.endswith(_MAY_CHANGE)  # also `updates.generator.optimizer.fused`


def is_within(name: str, sections: Iterable[str]) -> bool:
    """Return whether a setting, named as users write it, is one of these or in one of these sections."""
    return any(name == section or name.startswith(f"{section}.") for section in sections)


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Return the differences between two configurations, as `Config.to_dict` or its JSON."""
    old_values = settings(before)
    new_values = settings(now)
    differences = []
    for name in sorted(old_values.keys() | new_values.keys()):
        old = old_values.get(name, _UNSET)
        new = new_values.get(name, _UNSET)
        if old != new:
            differences.append(Change(name, _text(old), _text(new)))
    return differences


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are compared, by name, of `Config.to_dict` or its JSON."""
    plain = json.loads(strict_json(config, default=str))  # equal whether or not it has been in a file
    return dict(_each_setting(plain))


def _each_setting(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all settings, as a user writes them. The order is that of the configuration: sweeps
    keep digests.
    """
    arguments = values.get("arguments") or {}
    for key, value in values.items():
        name = prefix + _AS_WRITTEN.get(key, key)
        if name in _NOT_COMPARED:
            continue
        if key in arguments:  # written instead of the setting of this name, see `claimed_settings`
            continue
        if key == "arguments":
            for argument, argument_value in value.items():
                # Written beside a class, a setting is an argument until the class is known not to claim it.
                may_be_setting = argument in values
                if may_be_setting and _is_empty(argument_value):
                    continue
                yield prefix + argument, argument_value
        elif name == "updates":
            for update in value:
                yield from _each_setting(update, f"updates.{update['name']}.")
        elif isinstance(value, dict):
            yield from _each_setting(value, f"{name}.")
        elif not _is_empty(value) and value != _DEFAULT_OF_LATER.get(name):
            yield name, value


def _is_empty(value: Any) -> bool:
    """Return whether a value equals a missing one."""
    return value is None or value == []


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)
