"""The rules of `optimizer.groups`: options of the parameters that patterns match.

Checked by hand: only the optimizer's class knows which options exist (`optim.groups`).
"""

from typing import Any

OWN = ("match", "freeze")  # what is no option of an optimizer
_GROUP = '{match: "head.*", lr: 1e-2}'
_EXAMPLE = f"[{_GROUP}, {{match: backbone, freeze: true}}]"


def check(value: Any) -> list[dict[str, Any]]:
    """The groups, each with a list under "match". Raises ValueError with all mistakes."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of groups, such as {_EXAMPLE}")
    rules = [rule for number, group in enumerate(value) for rule in _rules(number, group)]
    if rules:
        raise ValueError("; ".join(rules))
    return [{**group, "match": patterns_of(group)} for group in value]


def patterns_of(group: dict[str, Any]) -> list[str]:
    """The patterns of a group: `match` may be one or a list."""
    match = group["match"]
    return [match] if isinstance(match, str) else list(match)


def _rules(number: int, group: Any) -> list[str]:
    if not isinstance(group, dict):
        return [f"group {number} must be a mapping, such as {_GROUP}"]
    match = group.get("match")
    patterns = match if isinstance(match, list) else [match]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        return [f"group {number} needs `match`: the name of parameters or of a module, a pattern, or a list of them"]
    freeze = group.get("freeze", False)
    if not isinstance(freeze, bool):
        return [f"freeze={freeze!r} of group {number} must be true or false"]
    options = [name for name in group if name not in OWN]
    if freeze and options:
        return [f"group {number} is frozen, so that {', '.join(options)} would have no effect; leave one of them out"]
    if not freeze and not options:
        return [f"group {number} changes nothing; give it lr, weight_decay, another option, or freeze: true"]
    return [
        f"{name}={group[name]!r} of group {number} must be a number {rule}"
        for name, least, rule in (("lr", None, "above 0"), ("weight_decay", 0.0, "of at least 0"))
        if name in group and not _is_number(group[name], least)
    ]


def _is_number(value: Any, least: float | None) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value < float("inf"):
        return False
    return value > 0 if least is None else value >= least
