"""`batch.micro_schedule`: sizes by the step from which they hold, one for all shapes or one for each. With `updates`,
there is one such schedule by the name of each. Imports no torch.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_FORM = (
    "must give sizes by the step from which they hold, such as {1: 64, 30: 32}, or by step and elements per sample, "
    "such as {1: {128: 64, 256: 32}}; null for none"
)


def check(value: Any) -> Any:
    """The schedule with whole numbers for keys, which may be strings as in result.json; all of it may be the text of a
    JSON object, for the command line. Raises ValueError for anything else.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if is_by_update(value):
            return {name: _checked(own) for name, own in value.items()}
        return _checked(value)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(_FORM) from None


def _checked(schedule: Any) -> dict[int, Any]:
    checked = {
        int(step): {int(shape): _whole(size) for shape, size in sizes.items()}
        if isinstance(sizes, dict)
        else _whole(sizes)
        for step, sizes in schedule.items()
    }
    if not checked or min(checked) < 1 or {} in checked.values():
        raise ValueError
    return checked


def _whole(size: Any) -> int:
    if type(size) is not int or size < 1:
        raise ValueError
    return size


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
