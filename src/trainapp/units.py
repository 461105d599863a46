"""Sizes, durations, lists and names as people write and read them. Imports nothing that takes time."""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainapp.errors import UserError

DURATIONS = ("steps", "epochs", "samples", "percent")  # of the run; all are converted to steps, as in big_vision
_DURATION_NAMES = {"epoch": "epochs", "": "steps", "step": "steps", "sample": "samples"}  # other spellings
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)(?![a-z])\s*")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*")
_BYTES = {
    "": 1, "b": 1,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
}  # fmt: skip


def parse_memory_size(value: int | float | str, total: int) -> int:
    """Return the bytes of a size: `8589934592`, `8GiB`, `500MB`, or a fraction of `total` (bytes) such as 0.5.

    Raises a ValueError that states the rule for anything else.
    """
    rule = "must be bytes, a size such as 8GiB or 500MB, or a fraction of the device between 0 and 1"
    match = _SIZE.fullmatch(str(value).lower())
    if isinstance(value, bool) or not match or match[2] not in _BYTES:
        raise ValueError(rule)
    amount = float(match[1])
    unit = match[2]

    # Without a unit: a fraction, or whole bytes. The integer 1 is a byte.
    is_fraction = not unit and 0 < amount <= 1 and not isinstance(value, int)
    if is_fraction:
        return int(amount * total)
    if not unit and not amount.is_integer():
        raise ValueError(rule)

    size = amount * _BYTES[unit]
    if size < 1:
        raise ValueError(rule)
    return int(size)


@dataclass(frozen=True)
class RunLength:
    """The lengths that durations refer to. `steps_per_epoch` is None for a stream."""

    steps_per_epoch: int | None
    global_size: int
    total_steps: int


def parse_duration(value: int | str) -> tuple[float, str]:
    """Return `(amount, unit)` of a duration. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        amount = float(value)
        unit = "steps"
    else:
        match = _DURATION.fullmatch(str(value))
        unit = match[2] if match else "none"
        unit = _DURATION_NAMES.get(unit, unit)
        if not match or unit not in DURATIONS:
            raise ValueError(
                "must be a number of steps, or like '2 epochs', '10000 samples', '5 percent'; every.save may also be a "
                "time, like '20 minutes'"
            )
        amount = float(match[1])

    if amount < 0:
        raise ValueError("must not be negative")
    if unit == "percent" and amount > 100:
        raise ValueError("must be at most 100 percent")
    return amount, unit


def parse_time(value: int | str | None) -> float | None:
    """Return the seconds of a time: `11h50m`, `90 minutes`, `1.5 hours`, `45s`, `2 days`. None for anything else."""
    if not isinstance(value, str) or _TIME.sub("", value):
        return None
    seconds = 0.0
    for amount, unit in _TIME.findall(value):
        seconds += float(amount) * _SECONDS[unit[0]]
    return seconds or None


def to_steps(setting: str, value: int | str | None, run: RunLength) -> int:
    """Return a duration in optimizer steps, rounded to the nearest, at least 1 unless it is zero. None gives 0: never.

    Raises UserError for epochs of a stream.
    """
    if value is None:
        return 0
    amount, unit = parse_duration(value)
    if unit == "percent":
        steps = amount / 100 * run.total_steps
    elif unit == "epochs":
        if run.steps_per_epoch is None:
            raise UserError(f"{setting}={value}: a stream's epochs have no known length; use steps or samples")
        steps = amount * run.steps_per_epoch
    elif unit == "samples":
        steps = amount / run.global_size
    else:
        steps = amount
    if amount == 0:
        return 0
    return max(1, math.floor(steps + 0.5))


def bytes_text(count: float) -> str:
    """Return a number of bytes in words: '1.5 KiB' for 1536."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def plural(count: int, noun: str) -> str:
    """Return the count with its noun: `1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return a list in words: 'a, b, c and 2 more'."""
    names = list(names)
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts by dotted name. An empty dict is a value."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'depth'?`, or "" if no choice is close."""
    close_matches = difflib.get_close_matches(word, list(choices), n=1)
    if not close_matches:
        return ""
    return f"; did you mean '{close_matches[0]}'?"
