"""The search space of a sweep, in Hydra's grammar: `model=mlp,resnet`, `range(1,4)` (without 4), `glob(*)`,
`interval(1e-4,1e-1)`, `int(interval(1,8))`, `tag(log,interval(1e-5,1e-2))`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from trainapp.config.command_line import as_entered
from trainapp.errors import UserError

Values = tuple[str, ...]  # one per dimension, as in overrides


@dataclass(frozen=True)
class Dimension:
    """A swept setting: a choice of `values`, or else any number in [low, high]; with `is_log` drawn by its logarithm.

    key: with Hydra's marks, such as `+`.
    """

    key: str
    values: Values = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False

    def text(self, value: Any) -> str:
        """The value as in an override: a number has six digits, which a person can read."""
        if self.values:
            return str(value)
        return str(round(value)) if self.is_whole else repr(min(max(float(f"{value:.6g}"), self.low), self.high))

    def value(self, text: str) -> Any:
        """The inverse of `text`."""
        return text if self.values else int(text) if self.is_whole else float(text)

    @property
    def ends(self) -> Values:
        """The values to check before anything runs."""
        return self.values or (self.text(self.low), self.text(self.high))

    def __str__(self) -> str:
        return ", ".join(self.values) or f"[{self.low:g}, {self.high:g}]{' by logarithm' * self.is_log}"


@dataclass(frozen=True)
class Space:
    """fixed: the overrides that all jobs have."""

    fixed: Values
    dimensions: tuple[Dimension, ...]

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "Space":
        """The inverse of `to_dict`."""
        found = (Dimension(**own | {"values": tuple(own["values"])}) for own in facts["dimensions"])
        return cls(tuple(facts["fixed"]), tuple(found))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in JSON."""
        return {"fixed": [*self.fixed], "dimensions": [asdict(of) | {"values": [*of.values]} for of in self.dimensions]}

    def swept(self, values: Values) -> list[str]:
        """The overrides in which jobs differ."""
        return [f"{of.key}={value}" for of, value in zip(self.dimensions, values, strict=True)]

    @property
    def intervals(self) -> list[str]:
        """The settings that have no list of values."""
        return [of.key for of in self.dimensions if not of.values]

    @property
    def size(self) -> float:
        """The number of configurations; infinite with intervals."""
        return math.inf if self.intervals else math.prod(len(of.values) for of in self.dimensions)

    def grid(self) -> Iterator[Values]:
        """All configurations, the last setting varying fastest. Without intervals."""
        return itertools.product(*(of.values for of in self.dimensions))

    def covering(self) -> Iterator[Values]:
        """Configurations that together have each choice and both ends of each interval; elsewhere the first value."""
        first = tuple(of.ends[0] for of in self.dimensions)
        yield first
        for place, of in enumerate(self.dimensions):
            yield from ((*first[:place], value, *first[place + 1 :]) for value in of.ends[1:])


def parse(overrides: Sequence[str], loader: ConfigLoader) -> Space:
    """The space of these overrides; the later one of a setting counts, and `sweep.*` is left out. Raises UserError with
    all mistakes.
    """
    found: dict[str, str | Dimension] = {}
    errors = []
    for own in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)):
        key, text = as_entered(own.get_key_element()), as_entered(str(own.input_line))
        is_of_sweep = own.key_or_group.partition(".")[0] == "sweep"
        try:
            if own.is_sweep_override():
                if is_of_sweep:
                    raise ValueError("a setting of the sweep itself has one value")
                found[key] = _dimension(key, own)
            elif not is_of_sweep:
                found[key] = text
        except ValueError as error:
            errors.append(f"{text}: {error}")
    if errors:
        raise UserError("\n".join(errors))
    fixed = tuple(own for own in found.values() if isinstance(own, str))
    return Space(fixed, tuple(own for own in found.values() if isinstance(own, Dimension)))


def _dimension(key: str, own: Override) -> Dimension:
    if not own.is_interval_sweep():
        values = tuple(own.sweep_string_iterator())
        if not values:
            raise ValueError("no value at all; a range leaves its end out, and a glob matches names of options")
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise ValueError(f"{', '.join(twice)} is given twice")
        return Dimension(key, values)
    sweep: Any = own.value()
    if others := sweep.tags - {"log"}:
        raise ValueError(f"the tag {', '.join(sorted(others))} has no meaning here; `log` is the only one")
    low, high, is_log = sweep.start, sweep.end, "log" in sweep.tags
    if low >= high:
        raise ValueError(f"its start must be less than its end: interval({high:g},{low:g})")
    if is_log and low <= 0:
        raise ValueError("an interval of logarithms must start above 0")
    return Dimension(key, (), low, high, is_log, isinstance(low, int))
