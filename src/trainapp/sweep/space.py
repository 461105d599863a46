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
        """Return a value as in an override: a number has six digits, which a person can read."""
        if self.values:
            return str(value)
        if self.is_whole:
            return str(round(value))
        rounded = float(f"{value:.6g}")
        return repr(min(max(rounded, self.low), self.high))  # rounding must not leave the interval

    def value(self, text: str) -> Any:
        """Return the value that is written as `text`: the inverse of `text()`."""
        if self.values:
            return text
        if self.is_whole:
            return int(text)
        return float(text)

    @property
    def ends(self) -> Values:
        """The values to check before anything runs."""
        return self.values or (self.text(self.low), self.text(self.high))

    def __str__(self) -> str:
        if self.values:
            return ", ".join(self.values)
        text = f"[{self.low:g}, {self.high:g}]"
        if self.is_log:
            text += " by logarithm"
        return text


@dataclass(frozen=True)
class Space:
    """The swept settings, and the overrides that all jobs have."""

    fixed: Values
    dimensions: tuple[Dimension, ...]

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "Space":
        """Return the space that `to_dict` has written."""
        dimensions = []
        for arguments in facts["dimensions"]:
            values = tuple(arguments["values"])
            dimensions.append(Dimension(**arguments | {"values": values}))
        return cls(tuple(facts["fixed"]), tuple(dimensions))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        dimensions = [asdict(dimension) | {"values": list(dimension.values)} for dimension in self.dimensions]
        return {"fixed": list(self.fixed), "dimensions": dimensions}

    def swept_overrides(self, values: Values) -> list[str]:
        """Return a job's overrides of the swept settings, in which jobs differ."""
        pairs = zip(self.dimensions, values, strict=True)
        return [f"{dimension.key}={value}" for dimension, value in pairs]

    @property
    def intervals(self) -> list[str]:
        """The settings that have no list of values."""
        return [dimension.key for dimension in self.dimensions if not dimension.values]

    @property
    def size(self) -> float:
        """The number of configurations; infinite with intervals."""
        if self.intervals:
            return math.inf
        return math.prod(len(dimension.values) for dimension in self.dimensions)

    def grid(self) -> Iterator[Values]:
        """Iterate over all configurations, the last setting varying fastest. For a space without intervals."""
        values_of_dimensions = [dimension.values for dimension in self.dimensions]
        return itertools.product(*values_of_dimensions)

    def covering(self) -> Iterator[Values]:
        """Yield configurations that together have each choice and both ends of each interval; the settings not being
        varied have their first value.
        """
        first = [dimension.ends[0] for dimension in self.dimensions]
        yield tuple(first)
        for position, dimension in enumerate(self.dimensions):
            for value in dimension.ends[1:]:
                varied = list(first)
                varied[position] = value
                yield tuple(varied)


def parse(overrides: Sequence[str], loader: ConfigLoader) -> Space:
    """Return the space of these overrides. Of a setting given twice the later override counts; `sweep.*` is left out.

    Raises UserError with all mistakes.
    """
    # The later of two overrides of a setting replaces the earlier one, of whichever kind.
    by_key: dict[str, str | Dimension] = {}
    errors = []
    parser = OverridesParser.create(config_loader=loader)
    for override in parser.parse_overrides(list(overrides)):
        key = as_entered(override.get_key_element())
        text = as_entered(str(override.input_line))
        is_of_sweep = override.key_or_group.partition(".")[0] == "sweep"
        try:
            if override.is_sweep_override():
                if is_of_sweep:
                    raise ValueError("a setting of the sweep itself has one value")
                by_key[key] = _dimension(key, override)
            elif not is_of_sweep:
                by_key[key] = text
        except ValueError as error:
            errors.append(f"{text}: {error}")
    if errors:
        raise UserError("\n".join(errors))

    fixed = []
    dimensions = []
    for text_or_dimension in by_key.values():
        if isinstance(text_or_dimension, Dimension):
            dimensions.append(text_or_dimension)
        else:
            fixed.append(text_or_dimension)
    return Space(tuple(fixed), tuple(dimensions))


def _dimension(key: str, override: Override) -> Dimension:
    """Return the dimension of an override that sweeps a setting. Raises ValueError for a mistake in it."""
    if override.is_interval_sweep():
        return _interval(key, override)
    return _choice(key, override)


def _interval(key: str, override: Override) -> Dimension:
    interval: Any = override.value()
    unknown_tags = interval.tags - {"log"}
    if unknown_tags:
        tags = ", ".join(sorted(unknown_tags))
        raise ValueError(f"the tag {tags} has no meaning here; `log` is the only one")

    # Hydra gives whole numbers for `int(interval(1,8))`.
    low = interval.start
    high = interval.end
    is_log = "log" in interval.tags
    if low >= high:
        raise ValueError(f"its start must be less than its end: interval({high:g},{low:g})")
    if is_log and low <= 0:
        raise ValueError("an interval of logarithms must start above 0")
    return Dimension(key, (), low, high, is_log, is_whole=isinstance(low, int))


def _choice(key: str, override: Override) -> Dimension:
    values = tuple(override.sweep_string_iterator())
    if not values:
        raise ValueError("no value at all; a range leaves its end out, and a glob matches names of options")
    repeated = sorted({value for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} is given twice")
    return Dimension(key, values)
