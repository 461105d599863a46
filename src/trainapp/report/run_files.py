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
from trainapp.files import each_json_line, json_object
from trainapp.units import flat

CONFIG, COMMAND, RESULT = ".hydra/config.yaml", ".hydra/command.json", "result.json"
CURVES = {"train": "metrics.jsonl", "eval": "evaluations.jsonl", "callbacks": "callbacks.jsonl"}
MOST, POINTS = 2000, 24_000  # points per curve, and of all curves of a page, which take about 20 bytes each
ROWS, CHARACTERS = 200, 500  # incidents per run, and the longest text of one and of a setting
_LINE = re.compile(r"\[(?P<time>[\d-]+ [\d:]+)[^]]*\] (?P<level>[A-Z]+) (?P<text>.+)")
# The page's head shows the recipe's first line, which `run.recipe` writes with " parameters on "; see `_log`. The other
# lines of the recipe are notes.
_SHOWN_ELSEWHERE = re.compile(r"step \d+(/\d+)? (\||evaluated )|out of memory at step|.* parameters on ")
_OF_OOM = (
    *("step", "phase", "module", "requested", "used", "limit", "by_category", "rank", "old_size", "new_size"),
    *("action", "seconds_lost"),
)


@dataclass
class Curve:
    """A scalar by step. values: nan for each that was not finite."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))

    def until(self, last: int | None) -> "Curve":
        """Return the curve without what follows the step `last`; None: as it is."""
        if last is None:
            return self
        count = sum(step <= last for step in self.steps)
        return Curve(self.steps[:count], self.values[:count])

    def points(self, most: int) -> dict[str, list[Any]]:
        """At most about `most` points with the same minima, maxima and gaps, as `{"x": steps, "y": values}`."""
        steps, values = np.array(self.steps), np.array(self.values)
        steps, values = _without_flat(steps, values)
        if len(steps) > most:
            kept = _extremes(values, max(1, most // 3))
            steps, values = steps[kept], values[kept]
        return {
            "x": [int(step) for step in steps],
            "y": [float(f"{value:.6g}") if math.isfinite(value) else None for value in values],
        }


def _without_flat(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the points between two of the same value: the line through the others is the same."""
    known = np.nan_to_num(values, nan=math.inf)
    kept = np.ones(len(values), bool)
    kept[1:-1] = (known[1:-1] != known[:-2]) | (known[1:-1] != known[2:])
    return steps[kept], values[kept]


def _extremes(values: np.ndarray, parts: int) -> np.ndarray:
    """The places of the first and the last value and, in each of about `parts` equal parts, of the smallest, the
    largest and the first nan.
    """
    width = -(-len(values) // parts)
    padded = np.full(-(-len(values) // width) * width, math.nan)
    padded[: len(values)] = values
    rows = padded.reshape(-1, width)
    gaps = np.isnan(rows)
    inside = [np.where(gaps, math.inf, rows).argmin(1), np.where(gaps, -math.inf, rows).argmax(1), gaps.argmax(1)]
    starts = np.arange(len(rows)) * width
    places = np.unique(np.concatenate([[0, len(values) - 1], *(starts + own for own in inside)]))
    return places[places < len(values)]


def shared_out(curves: Sequence[Curve]) -> list[dict[str, list[Any]]]:
    """The points of each curve: the fewer, the more curves there are; what short ones leave is for the others."""
    points: dict[int, dict[str, list[Any]]] = {}
    left = POINTS
    by_length = sorted(range(len(curves)), key=lambda at: len(curves[at].steps))
    for done, at in enumerate(by_length):
        points[at] = curves[at].points(max(6, min(MOST, left // (len(curves) - done))))
        left -= len(points[at]["x"])
    return [points[at] for at in range(len(curves))]


def state_of(result: Mapping[str, Any]) -> str:
    """Return finished, stopped (by a signal), failed, or nothing for a run that has not ended, from its result.json."""
    if result.get("failed"):
        return "failed"
    if result.get("stopped"):
        return "stopped"
    return "finished" if result.get("ended") else ""


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
    for path in sorted(folder.glob(f"checkpoints/step_{8 * '[0-9]'}/{MANIFEST}"), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            manifest = read_any_manifest(path.parent)
            if manifest.get("config"):
                return manifest
    return {}


def read(folder: Path) -> dict[str, Any]:
    """Everything of a run that its page shows. `curves` has a `Curve` per name."""
    result = json_object(folder / RESULT)
    started = json_object(folder / COMMAND)
    headline, notes = _log(folder / "trainapp.log")
    overrides = _yaml(folder / ".hydra/overrides.yaml") or []
    return {
        "folder": str(folder.resolve()),
        "state": state_of(result) or "not finished",
        "headline": headline,
        "result": {name: value for name, value in result.items() if name != "micro_schedule"},
        "curves": {group: curves_in(folder / name) for group, name in CURVES.items()},
        "sizes": _sizes(result.get("micro_schedule")),
        "ooms": [{name: own.get(name) for name in _OF_OOM} for own in _oom_reports(folder / "oom")],
        "notes": notes,
        "overrides": [str(text)[:CHARACTERS] for text in overrides],
        "settings": {name: typed(value) for name, value in flat(composed_settings(folder))},
        "command": started.get("arguments"),
        "environment": {name: value for name, value in started.items() if name != "arguments"},
    }


def _yaml(path: Path) -> Any:
    with contextlib.suppress(OSError, yaml.YAMLError):
        return yaml.safe_load(path.read_text())
    return None


def curves_in(path: Path) -> dict[str, Curve]:
    """The numbers in a file of JSON lines. Null is a value that was not finite."""
    found: dict[str, Curve] = defaultdict(Curve)
    for line in each_json_line(path):
        step = line.pop("step", None)
        line.pop("samples", None)
        for name, value in line.items() if step is not None else ():
            if value is None or type(value) in (int, float):
                curve = found[name]
                curve.steps.append(step)
                curve.values.append(math.nan if value is None else value)
    return dict(found)


def _sizes(schedule: Any) -> dict[str, list[int]] | None:
    """The micro-batch sizes of the whole run, where there is one size at a time: not per shape or per update."""
    if not schedule or not all(isinstance(size, int) for size in schedule.values()):
        return None
    steps = sorted(map(int, schedule))
    kept = [*steps[: MOST - 1], *steps[MOST - 1 :][-1:]]
    return {"x": kept, "y": [schedule[str(step)] for step in kept]}


def _oom_reports(folder: Path) -> list[dict[str, Any]]:
    """The first reports and the last one: one error per file, in order."""
    paths = sorted(folder.glob("*.json"))
    return [own for path in [*paths[: ROWS - 1], *paths[ROWS - 1 :][-1:]] if (own := json_object(path))]


def _log(path: Path) -> tuple[str, list[dict[str, str]]]:
    """The line that describes model and batch, and the run's notes and warnings, without those about progress."""
    headline = ""
    notes: list[dict[str, str]] = []
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            if (found := _LINE.match(line)) is None:
                continue
            if " parameters on " in found["text"]:
                headline = found["text"]
            elif len(notes) < ROWS and not _SHOWN_ELSEWHERE.match(found["text"]):
                notes.append(found.groupdict() | {"text": found["text"][:CHARACTERS]})
    return headline, notes


def typed(value: Any) -> str:
    """The value of a setting as it would be typed."""
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))[:CHARACTERS]
