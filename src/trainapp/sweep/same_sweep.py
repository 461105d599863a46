"""Whether a command continues the sweep in its directory or is another one, which is refused there."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainapp.config import resume_rules
from trainapp.config.schema import Config, Sweep
from trainapp.errors import UserError
from trainapp.sweep.journal import Journal
from trainapp.sweep.space import Dimension, Space

# Settings that do not choose the jobs.
_MAY_CHANGE = ("trials", "parallel", "pack", "max_time", "max_failures", "retry_failed", "storage")


def request_of(settings: Sweep, space: Space) -> dict[str, Any]:
    """Return what a command asks for, as plain values: the settings and the space that decide which sweep it is."""
    deciding = {name: value for name, value in asdict(settings).items() if name not in _MAY_CHANGE}
    return deciding | space.to_dict()


def differences(request_before: dict[str, Any], request_now: dict[str, Any]) -> list[str]:
    """Return what makes it another sweep. A grid may have grown."""
    before = _by_name(request_before)
    now = _by_name(request_now)
    if request_now["sampler"] == "grid":
        for name in before.keys() & now.keys():
            if _has_grown(before[name], now[name]):
                before[name] = now[name]
    texts = []
    for name in before | now:
        if before.get(name) != now.get(name):
            texts.append(f"{name}: {before.get(name, 'not given')} before, {now.get(name, 'not given')} now")
    if not texts and list(before) != list(now):
        texts.append(f"the order of {', '.join(before)}")
    return texts


def _by_name(request: dict[str, Any]) -> dict[str, Any]:
    """Return what was asked for, by name: the settings of the sweep, those of all jobs, and the swept ones."""
    space = Space.from_dict(request)
    values = {f"sweep.{name}": value for name, value in request.items() if name not in ("fixed", "dimensions")}
    fixed = {}
    for text in space.fixed:
        name, _, value = text.partition("=")
        fixed[name] = value
    values |= dict(sorted(fixed.items()))
    values |= {dimension.key: dimension for dimension in space.dimensions}
    return values


def _has_grown(before: Any, now: Any) -> bool:
    """Return whether both are swept settings and the later one has all values of the earlier."""
    are_swept = isinstance(before, Dimension) and isinstance(now, Dimension)
    return are_swept and set(before.values) <= set(now.values)


def config_changes(journal: Journal, first_config: Config) -> list[str]:
    """Return what has changed in the configuration of the first job since the sweep began."""
    return [str(change) for change in resume_rules.changes(journal.first_request["config"], first_config.to_dict())]


def require_none(differences: Sequence[str], folder: Path) -> None:
    """Raise UserError if there are differences to the sweep in this directory."""
    if not differences:
        return
    lines = "\n".join(f"  {line}" for line in differences)
    may_change = ", ".join(f"sweep.{name}" for name in _MAY_CHANGE)
    raise UserError(
        f"hydra.sweep.dir={folder}: this directory belongs to another sweep, or its files have changed:\n{lines}\n"
        f"choose another directory, or change them back; a grid may get more values, and {may_change} may change"
    )
