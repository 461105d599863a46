"""Sizes, lists and names as people write and read them. Imports nothing that takes time."""

import difflib
import re
from collections.abc import Iterable


def parse_memory_size(value: int | float | str, total: int) -> int:
    """Bytes of a size: `8589934592`, `8GiB`, `500MB`, or a fraction of `total` (bytes) such as 0.5.

    Raises a ValueError that states the rule for anything else.
    """
    rule = "must be bytes, a size such as 8GiB or 500MB, or a fraction of the device between 0 and 1"
    units = {"": 1, "b": 1} | {
        f"{prefix}{suffix}": base**power
        for power, prefix in enumerate("kmgt", start=1)
        for suffix, base in (("ib", 1024), ("b", 1000))
    }
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if isinstance(value, bool) or not match or match[2] not in units:
        raise ValueError(rule)
    amount = float(match[1])
    if not match[2] and not amount.is_integer() and amount > 1:
        raise ValueError(f"{rule}: {value} of what? Write {value}GiB, or whole bytes")
    if not match[2] and 0 < amount <= 1 and not isinstance(value, int):
        return int(amount * total)
    if amount * units[match[2]] < 1:
        raise ValueError(rule)
    return int(amount * units[match[2]])


def bytes_text(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def listed(names: Iterable[str], most: int = 3) -> str:
    """['a', 'b', 'c', 'd', 'e'] -> 'a, b, c and 2 more'."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def suggest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'depth'?`, or nothing when no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
