"""The search space of a sweep, in Hydra's grammar: `model=mlp,resnet`, `range(1,4)` (without 4), `glob(*)`,
`interval(1e-4,1e-1)`, `int(interval(1,8))`, `tag(log,interval(1e-5,1e-2))`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from trainapp.errors import UserError

Values = tuple[str, ...]  # one per dimension, as in overrides


@dataclass(frozen=True)
class Choice:
    """A setting with a list of values. key: with Hydra's marks, such as `+`."""

    key: str
    values: Values

    @property
    def ends(self) -> Values:
        """The values to check before anything runs."""
        return self.values


@dataclass(frozen=True)
class Interval:
    """A setting with any value in [low, high]; with `is_log` drawn by its logarithm."""

    key: str
    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    def text(self, value: float) -> str:
        """The value as in an override: with six digits, which a person can read."""
        return str(round(value)) if self.is_whole else repr(min(max(float(f"{value:.6g}"), self.low), self.high))

    @property
    def ends(self) -> Values:
        """The values to check before anything runs."""
        return self.text(self.low), self.text(self.high)


Dimension = Choice | Interval


@dataclass(frozen=True)
class Space:
    """fixed: the overrides that all jobs have."""

    fixed: tuple[str, ...]
    dimensions: tuple[Dimension, ...]

    def overrides(self, values: Values) -> list[str]:
        """Those of one job."""
        return [*self.fixed, *self.swept(values)]

    def swept(self, values: Values) -> list[str]:
        """The overrides in which jobs differ."""
        return [f"{of.key}={value}" for of, value in zip(self.dimensions, values, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """The dimensions as plain values."""
        return {of.key: list(of.values) if isinstance(of, Choice) else asdict(of) for of in self.dimensions}

    @classmethod
    def from_dict(cls, dimensions: dict[str, Any]) -> "Space":
        """The inverse of `to_dict`, without fixed overrides."""
        found = (Choice(k, tuple(v)) if isinstance(v, list) else Interval(**v) for k, v in dimensions.items())
        return cls((), tuple(found))

    @property
    def intervals(self) -> list[str]:
        """The settings that have no list of values."""
        return [of.key for of in self.dimensions if isinstance(of, Interval)]

    @property
    def size(self) -> int | None:
        """The number of configurations; None if there are intervals."""
        if self.intervals:
            return None
        size = 1
        for of in self.dimensions:
            size *= len(of.ends)
        return size

    def grid(self) -> Iterator[Values]:
        """All configurations, the last setting varying fastest. Without intervals."""
        return itertools.product(*(of.ends for of in self.dimensions))

    def samples(self) -> Iterator[Values]:
        """Configurations that together have each choice and both ends of each interval; elsewhere the first value."""
        first = tuple(of.ends[0] for of in self.dimensions)
        yield first
        for place, of in enumerate(self.dimensions):
            yield from ((*first[:place], value, *first[place + 1 :]) for value in of.ends[1:])


def parse(overrides: Sequence[str], loader: ConfigLoader) -> Space:
    """The space of these overrides; the later one of a setting counts, and `sweep.*` is left out. Raises UserError with
    all mistakes.
    """
    fixed: dict[str, str] = {}
    dimensions: dict[str, Dimension] = {}
    errors = []
    for own in OverridesParser.create(config_loader=loader).parse_overrides(list(overrides)):
        key, text = own.get_key_element(), str(own.input_line)
        fixed.pop(key, None)
        dimensions.pop(key, None)
        is_of_sweep = own.key_or_group.partition(".")[0] == "sweep"
        if not own.is_sweep_override():
            if not is_of_sweep:
                fixed[key] = text
            continue
        try:
            if is_of_sweep:
                raise ValueError("a setting of the sweep itself has one value")
            dimensions[key] = _dimension(key, own)
        except ValueError as error:
            errors.append(f"{text}: {error}")
    if errors:
        raise UserError("\n".join(errors))
    return Space(tuple(fixed.values()), tuple(dimensions.values()))


def _dimension(key: str, own: Override) -> Dimension:
    if not own.is_interval_sweep():
        values = tuple(own.sweep_string_iterator())
        if not values:
            raise ValueError("no value at all; a range leaves its end out, and a glob matches names of options")
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise ValueError(f"{', '.join(twice)} is given twice")
        return Choice(key, values)
    sweep: Any = own.value()
    if others := sweep.tags - {"log"}:
        raise ValueError(f"the tag {', '.join(sorted(others))} has no meaning here; `log` is the only one")
    low, high, is_log = sweep.start, sweep.end, "log" in sweep.tags
    if low >= high:
        raise ValueError(f"its start must be less than its end: interval({high:g},{low:g})")
    if is_log and low <= 0:
        raise ValueError("an interval of logarithms must start above 0")
    return Interval(key, low, high, is_log, isinstance(low, int))
