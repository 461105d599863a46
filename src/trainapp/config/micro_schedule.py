"""The rules of `batch.micro_schedule`: sizes by the step from which they hold, one for all shapes or one for each.
With `updates`, there is one such schedule by the name of each.

Checked by hand: pydantic's errors for a union name its branches, which mean nothing to a user.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any


def check(value: Any) -> Any:
    """The schedule with whole numbers for keys. Raises ValueError with all its mistakes.

    Steps and shapes may be strings, as in result.json, and all of it the text of a JSON object, for the command line.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if is_by_update(value):
        return {name: _checked(schedule, f"{name}: ") for name, schedule in value.items()}
    return _checked(value)


def is_by_update(value: Any) -> bool:
    """Whether it has a schedule for each update, by name, in place of sizes by step."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(name, str) and name.isidentifier() and isinstance(own, dict) for name, own in value.items())


def entries(schedule: Mapping[Any, Any]) -> Iterator[tuple[int, Any]]:
    """`(step, sizes)` of all updates."""
    for own in schedule.values() if is_by_update(schedule) else (schedule,):
        yield from own.items()


def of_update(schedule: Mapping[Any, Any] | None, name: str) -> Mapping[int, Any] | None:
    """The schedule of this update; "" stands for the only one. None where there is none."""
    return schedule.get(name) if schedule is not None and name else schedule


def _checked(value: Any, place: str = "") -> Any:
    value, twice = _whole_keys(value)
    if not isinstance(value, dict) or not value:
        raise ValueError("must give sizes by the step from which they hold, such as {1: 64, 30: 32}; null for none")
    rules: list[str] = [f"{key} is given twice" for key in twice]
    for step, sizes in value.items():
        if not _is_whole(step):
            rules.append(f"{step!r} is not a step: write a whole number")
        elif step < 1:
            rules.append("steps start at 1")
        elif isinstance(sizes, dict):
            rules += _shape_rules(step, sizes)
        else:
            rules += _size_rules(f"step {step}", sizes)
    if rules:
        raise ValueError(place + "; ".join(dict.fromkeys(rules)))
    return value


def _whole_keys(value: Any) -> tuple[Any, list[int]]:
    """Nested dicts with whole numbers for keys such as "12", and the keys that are then given twice."""
    if not isinstance(value, dict):
        return value, []
    changed: dict[Any, Any] = {}
    twice: list[int] = []
    for key, sizes in value.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        if number in changed:
            twice.append(number)
        changed[number], more = _whole_keys(sizes)
        twice += more
    return changed, twice


def _shape_rules(step: int, sizes: dict[Any, Any]) -> list[str]:
    if not sizes:
        return [f"step {step} has no size"]
    rules: list[str] = []
    for shape, size in sizes.items():
        if not _is_whole(shape) or shape < 1 or shape & (shape - 1):
            rules.append(f"{shape!r} at step {step} is not a shape: those are the numbers in a sample as powers of two")
        else:
            rules += _size_rules(f"shape {shape} at step {step}", size)
    return rules


def _size_rules(place: str, size: Any) -> list[str]:
    if not _is_whole(size):
        return [f"the size for {place} must be a whole number, not {size!r}"]
    return [] if size >= 1 else [f"the size for {place} must be at least 1"]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
