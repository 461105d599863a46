"""What the files of a run say, as plain values for its page. Imports no torch.

A run that has not ended, or has failed or was killed, has only some of the files, and an incomplete last line.
"""

import contextlib
import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trainapp.checkpoint.manifest import MANIFEST, read_any_manifest
from trainapp.files import (
    CALLBACKS,
    CHECKPOINTS,
    COMMAND,
    CONFIG,
    EVALUATIONS,
    LOG,
    METRICS,
    OOM_REPORTS,
    OVERRIDES,
    RESULT,
    each_json_line,
    json_object,
)
from trainapp.units import flat

CURVES = {"train": METRICS, "eval": EVALUATIONS, "callbacks": CALLBACKS}
POINTS_PER_CURVE = 2000
POINTS = 24_000  # of all curves of a page; each takes about 20 bytes
FEWEST_POINTS = 6  # per curve, however many there are
INCIDENTS = 200  # per run
LONGEST_TEXT = 500  # characters of an incident or a setting
_LINE = re.compile(r"\[(?P<time>[\d-]+ [\d:]+)[^]]*\] (?P<level>[A-Z]+) (?P<text>.+)")
# The page's head shows the recipe's first line, which `run.recipe` writes with " parameters on "; see `_log`. The other
# lines of the recipe are notes.
_SHOWN_ELSEWHERE = re.compile(r"step \d+(/\d+)? (\||evaluated )|out of memory at step|.* parameters on ")
# Of an OOM report, what the page shows.
_OOM_FACTS = (
    "step",
    "phase",
    "module",
    "requested",
    "used",
    "limit",
    "by_category",
    "rank",
    "old_size",
    "new_size",
    "action",
    "seconds_lost",
)


@dataclass
class Curve:
    """A scalar by step."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))  # nan for each that was not finite

    def append(self, step: float, value: float | None) -> None:
        """Add a point. None: a value that was not finite."""
        self.steps.append(step)
        self.values.append(math.nan if value is None else value)

    def until(self, last_step: int | None) -> "Curve":
        """Return the curve up to and including a step; None: as it is."""
        if last_step is None:
            return self
        count = sum(step <= last_step for step in self.steps)
        return Curve(self.steps[:count], self.values[:count])

    def points(self, most: int) -> dict[str, list[Any]]:
        """Return at most about `most` points with the same minima, maxima and gaps, as `{"x": steps, "y": values}`."""
        steps = np.array(self.steps)
        values = np.array(self.values)

        # Drop points inside level stretches, which loses nothing.
        is_corner = _corners(values)
        steps = steps[is_corner]
        values = values[is_corner]

        # Then keep up to three points of each part.
        if len(steps) > most:
            part_count = max(1, most // 3)
            positions = _extremes(values, part_count)
            steps = steps[positions]
            values = values[positions]
        return {"x": [int(step) for step in steps], "y": [_rounded(value) for value in values]}


def _corners(values: np.ndarray) -> np.ndarray:
    """Return a mask of the values that are not between two equal ones: the line through them is the same."""
    comparable = np.nan_to_num(values, nan=math.inf)  # nan is not equal to itself
    differs_from_next = comparable[:-1] != comparable[1:]
    mask = np.ones(len(values), bool)
    mask[1:-1] = differs_from_next[:-1] | differs_from_next[1:]
    return mask


def _extremes(values: np.ndarray, part_count: int) -> np.ndarray:
    """Return the positions of the first and the last value and, in each of about `part_count` equal parts, of the
    smallest, the largest and the first nan.
    """
    # As a table with a row for each part, the last of which is filled up with nan.
    width = math.ceil(len(values) / part_count)
    row_count = math.ceil(len(values) / width)
    padded = np.full(row_count * width, math.nan)
    padded[: len(values)] = values
    rows = padded.reshape(row_count, width)

    # The column of each extreme, by row.
    is_nan = np.isnan(rows)
    smallest = np.where(is_nan, math.inf, rows).argmin(axis=1)
    largest = np.where(is_nan, -math.inf, rows).argmax(axis=1)
    first_nan = is_nan.argmax(axis=1)  # the first value where none is nan

    # Convert to positions in `values`, without those in the padding.
    row_starts = np.arange(row_count) * width
    ends = [0, len(values) - 1]
    candidates = np.concatenate([ends, row_starts + smallest, row_starts + largest, row_starts + first_nan])
    positions = np.unique(candidates)
    return positions[positions < len(values)]


def _rounded(value: float) -> float | None:
    """Return the value with six digits, or None if it is not finite."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def points_of_all(curves: Sequence[Curve]) -> list[dict[str, list[Any]]]:
    """Return the points of each curve: the fewer, the more curves there are. What short curves leave of `POINTS` is for
    the long ones.
    """
    numbers = list(range(len(curves)))
    shortest_first = sorted(numbers, key=lambda number: len(curves[number].steps))

    # Each curve may have an equal share of the points that those before it have not used.
    points_by_number: dict[int, dict[str, list[Any]]] = {}
    unused_points = POINTS
    curves_to_do = len(curves)
    for number in shortest_first:
        share = unused_points // curves_to_do
        most = max(FEWEST_POINTS, min(POINTS_PER_CURVE, share))
        points = curves[number].points(most)
        points_by_number[number] = points
        unused_points -= len(points["x"])
        curves_to_do -= 1
    return [points_by_number[number] for number in numbers]


def state_of(result: Mapping[str, Any]) -> str:
    """Return finished, stopped (by a signal), failed, or nothing for a run that has not ended, from its result.json."""
    if result.get("failed"):
        return "failed"
    if result.get("stopped"):
        return "stopped"
    if result.get("ended"):
        return "finished"
    return ""


def is_run(folder: Path) -> bool:
    """Return whether the folder has files of a run, which may have just begun."""
    return any((folder / name).exists() for name in (*CURVES.values(), CONFIG))


def composed_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that the command line has composed, in the layout of conf/train.yaml. Empty for a run from
    Python.
    """
    settings = _yaml(folder / CONFIG)
    return settings if isinstance(settings, dict) else {}


def newest_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the run's newest checkpoint that has a sound one; empty without any.

    A checkpoint with other damage counts: the damage is reported when it is loaded.
    """
    eight_digits = "[0-9]" * 8
    paths = sorted(folder.glob(f"{CHECKPOINTS}/step_{eight_digits}/{MANIFEST}"))
    for path in reversed(paths):
        with contextlib.suppress(OSError, ValueError):
            manifest = read_any_manifest(path.parent)
            if manifest.get("config"):
                return manifest
    return {}


def read(folder: Path) -> dict[str, Any]:
    """Return everything of a run that its page shows. `curves` has a `Curve` per name."""
    result = json_object(folder / RESULT)
    command = json_object(folder / COMMAND)
    headline, notes = _log(folder / LOG)
    overrides = _yaml(folder / OVERRIDES) or []  # none for a run from Python
    settings = flat(composed_settings(folder))
    return {
        "folder": str(folder.resolve()),
        "state": state_of(result) or "not finished",
        "headline": headline,
        "result": {name: value for name, value in result.items() if name != "micro_schedule"},
        "curves": {group: curves_in(folder / name) for group, name in CURVES.items()},
        "sizes": _sizes(result.get("micro_schedule")),
        "ooms": _oom_facts(folder / OOM_REPORTS),
        "notes": notes,
        "overrides": [str(text)[:LONGEST_TEXT] for text in overrides],
        "settings": {name: typed(value) for name, value in settings},
        "command": command.get("arguments"),
        "environment": {name: value for name, value in command.items() if name != "arguments"},
    }


def _yaml(path: Path) -> Any:
    with contextlib.suppress(OSError, yaml.YAMLError):
        return yaml.safe_load(path.read_text())
    return None


def curves_in(path: Path) -> dict[str, Curve]:
    """Return the numbers in a file of JSON lines. Null is a value that was not finite."""
    curves: dict[str, Curve] = defaultdict(Curve)
    for line in each_json_line(path):
        step = line.pop("step", None)
        line.pop("samples", None)
        if step is None:
            continue
        for name, value in line.items():
            if value is None or type(value) in (int, float):
                curves[name].append(step, value)
    return dict(curves)


def _sizes(schedule: Any) -> dict[str, list[int]] | None:
    """Return the micro-batch sizes of the whole run, where there is one size at a time: not per shape or per update."""
    if not schedule or not all(isinstance(size, int) for size in schedule.values()):
        return None
    all_steps = sorted(int(step) for step in schedule)
    steps = _first_ones_and_last(all_steps, POINTS_PER_CURVE)
    return {"x": steps, "y": [schedule[str(step)] for step in steps]}


def _oom_facts(folder: Path) -> list[dict[str, Any]]:
    """Return what the page shows of the first OOM reports and the last one. Each file has one, in order."""
    facts = []
    paths = sorted(folder.glob("*.json"))
    for path in _first_ones_and_last(paths, INCIDENTS):
        report = json_object(path)
        if report:
            facts.append({name: report.get(name) for name in _OOM_FACTS})
    return facts


def _first_ones_and_last(values: list[Any], most: int) -> list[Any]:
    """Return at most `most` values: the first ones and the last."""
    if len(values) <= most:
        return values
    return [*values[: most - 1], values[-1]]


def _log(path: Path) -> tuple[str, list[dict[str, str]]]:
    """Return the line that describes model and batch, and the notes and warnings, without those about progress."""
    headline = ""
    notes: list[dict[str, str]] = []
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            match = _LINE.match(line)
            if match is None:
                continue

            # The last such line wins: a resumed run logs several.
            text = match["text"]
            if " parameters on " in text:
                headline = text
            elif len(notes) < INCIDENTS and not _SHOWN_ELSEWHERE.match(text):
                note = {"time": match["time"], "level": match["level"], "text": text[:LONGEST_TEXT]}
                notes.append(note)
    return headline, notes


def typed(value: Any) -> str:
    """Return the value of a setting as it would be typed."""
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text[:LONGEST_TEXT]
