"""What differs between two runs, from their files alone, as plain values. Imports no torch.

A run that has not ended, has failed or was killed has only some of the files: what one of the two lacks is None.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainapp.config.resume_rules import Change, changes
from trainapp.files import json_object
from trainapp.report import run_files
from trainapp.report.run_files import Curve
from trainapp.tracking.scalars import is_of_machine

RECIPE = "recipe.json"  # how the run trains, as it was built
_LOG_ORDER = ("lr", "loss", "grad_norm")  # of scalars that begin to differ in one step: the cause before its effect
_ENVIRONMENT = ("host", "python", "torch", "trainapp")
_NOT_RECORDED = "not recorded"


class Pair(NamedTuple):
    """A named value of both runs, as text."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class ScalarDifference:
    """A scalar that differs in some step that both runs have logged. A value that is not finite is nan."""

    name: str
    step: int  # the first in which it differs
    a: float
    b: float
    largest: float  # the largest relative difference of all steps; inf where one value is not finite
    largest_step: int

    @property
    def relative(self) -> float:
        """The relative difference in the first step."""
        return float(relative_differences(np.array([self.a]), np.array([self.b]))[0])


@dataclass(frozen=True)
class LogDifference:
    """How what two runs have logged differs, by scalar, the first to differ first."""

    steps: list[int] = field(default_factory=list)  # those that both have logged
    last_steps: tuple[int, int] = (0, 0)  # the last that A and B have logged
    scalars: list[ScalarDifference] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    steps_only_in_a: list[int] = field(default_factory=list)
    steps_only_in_b: list[int] = field(default_factory=list)

    def step_before(self, step: int) -> int | None:
        """Return the last step before this one that both have logged, or None."""
        return max((earlier for earlier in self.steps if earlier < step), default=None)


# --- settings and the environment


def settings(a: Path, b: Path) -> list[Change] | None:
    """Return the settings that differ; None if no file has the settings of both runs in the same form."""
    readers: tuple[Callable[[Path], Any], ...] = (run_files.composed_settings, _checkpointed_settings)
    for read in readers:
        before, now = read(a), read(b)
        if before and now:
            return changes(before, now)
    return None


def _checkpointed_settings(run: Path) -> Any:
    return run_files.newest_manifest(run).get("config")


def precisions(a: Path, b: Path) -> set[str]:
    """Return the runs' `precision.mode`, as far as their files tell."""
    modes = set()
    for run in (a, b):
        configuration = run_files.composed_settings(run) or _checkpointed_settings(run) or {}
        mode = (configuration.get("precision") or {}).get("mode")
        if mode is not None:
            modes.add(mode)
    return modes


def environment(a: Path, b: Path) -> list[Pair]:
    """Return versions, hosts and numbers of ranks that differ, as far as both runs have recorded them."""
    facts_of_a, facts_of_b = _environment(a), _environment(b)
    common = [name for name in facts_of_a if name in facts_of_b]
    return _pairs({name: facts_of_a[name] for name in common}, {name: facts_of_b[name] for name in common})


def _environment(run: Path) -> dict[str, Any]:
    manifest = run_files.newest_manifest(run)
    recorded = manifest.get("versions", {}) | json_object(run / run_files.COMMAND)
    facts = {name: recorded[name] for name in _ENVIRONMENT if name in recorded}
    if "ranks" in manifest:
        facts["ranks"] = manifest["ranks"]
    return facts


def recipe(a: Path, b: Path) -> list[Pair] | None:
    """Return the entries of recipe.json that differ; None unless both runs have one."""
    recipes = [json_object(run / RECIPE) for run in (a, b)]
    if not all(recipes):
        return None
    entries_of_a, entries_of_b = (dict(_entries(recipe)) for recipe in recipes)
    return _pairs(entries_of_a, entries_of_b)


def _entries(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dicts and lists by dotted name. A list of plain values is one value."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _entries(value, f"{name}.{key}" if name else key)
    elif isinstance(values, list) and any(isinstance(value, (dict, list)) for value in values):
        for number, value in enumerate(values):
            yield from _entries(value, f"{name}.{number}")
    else:
        yield name, values


def micro_batches(a: Path, b: Path) -> list[Pair] | None:
    """Return how micro-batch sizes and retries after out-of-memory errors differ; None unless both runs have ended."""
    results = [json_object(run / run_files.RESULT) for run in (a, b)]
    if not all(results):
        return None
    rows = []
    for result in results:
        rows.append({"sizes by step": result.get("micro_schedule"), "OOM retries": result.get("oom_restarts")})
    return _pairs(*rows)


def dependence_on_micro_batch(a: Path, b: Path) -> list[str]:
    """Return why runs of these micro-batch sizes differ, as far as the runs know; empty for equal sizes."""
    results = [json_object(run / run_files.RESULT) for run in (a, b)]
    if results[0].get("micro_schedule") == results[1].get("micro_schedule"):
        return []
    reasons: dict[str, None] = {}  # in order, each once
    for result in results:
        reasons |= dict.fromkeys(result.get("depends_on_micro_batch", ()))
    return list(reasons)


def steps_of(run: Path, log: Mapping[str, Curve]) -> int:
    """Return how many steps a run has trained; of one that has not ended, the last that it has logged."""
    steps: int = json_object(run / run_files.RESULT).get("steps", _last_step(log))
    return steps


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Pair]:
    pairs = []
    for name in {**a, **b}:
        value_of_a, value_of_b = a.get(name, _NOT_RECORDED), b.get(name, _NOT_RECORDED)
        if value_of_a != value_of_b:
            pairs.append(Pair(name, run_files.typed(value_of_a), run_files.typed(value_of_b)))
    return pairs


# --- what was logged


def read_log(run: Path, name: str, last: int | None) -> dict[str, Curve]:
    """Return the scalars of a file of JSON lines that tell what a run computed, not how fast or in how much memory.

    last: the last step to read; None: all.
    """
    curves = run_files.curves_in(run / name)
    return {name: curve.until(last) for name, curve in curves.items() if not is_of_machine(name)}


def logs(a: Mapping[str, Curve], b: Mapping[str, Curve]) -> LogDifference:
    """Compare what two runs have logged in the steps that both have logged."""
    differing, equal = [], []
    for name in a.keys() & b.keys():
        difference = _scalar(name, a[name], b[name])
        if difference is None:
            equal.append(name)
        else:
            differing.append(difference)
    differing.sort(key=lambda scalar: (scalar.step, _rank(scalar.name), scalar.name))
    return LogDifference(
        steps=[int(step) for step in np.intersect1d(_steps(a), _steps(b))],
        last_steps=(_last_step(a), _last_step(b)),
        scalars=differing,
        equal=sorted(equal, key=lambda name: (_rank(name), name)),
        only_in_a=sorted(a.keys() - b.keys()),
        only_in_b=sorted(b.keys() - a.keys()),
        steps_only_in_a=[int(step) for step in np.setdiff1d(_steps(a), _steps(b))],
        steps_only_in_b=[int(step) for step in np.setdiff1d(_steps(b), _steps(a))],
    )


def _scalar(name: str, a: Curve, b: Curve) -> ScalarDifference | None:
    """Compare one scalar; None if it is equal in all steps that both have."""
    steps, in_a, in_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    values_of_a, values_of_b = np.array(a.values)[in_a], np.array(b.values)[in_b]
    differs = ~((values_of_a == values_of_b) | (np.isnan(values_of_a) & np.isnan(values_of_b)))
    if not differs.any():
        return None
    first = int(differs.argmax())
    relative = relative_differences(values_of_a, values_of_b)
    most = int(relative.argmax())
    return ScalarDifference(
        name=name,
        step=int(steps[first]),
        a=float(values_of_a[first]),
        b=float(values_of_b[first]),
        largest=float(relative[most]),
        largest_step=int(steps[most]),
    )


def relative_differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b| / max(|a|, |b|): 0 where both are equal or nan, inf where only one is finite."""
    scale = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(a - b) / scale
    relative[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    relative[np.isnan(a) != np.isnan(b)] = math.inf
    return relative


def kind_of(name: str) -> str:
    """Return what a scalar is, without the name of its update, parameter group or validation set: `lr` of `lr/head`."""
    parts = name.split("/")
    return next((part for part in parts if part in _LOG_ORDER), parts[-1])


def _rank(name: str) -> int:
    kind = kind_of(name)
    return _LOG_ORDER.index(kind) if kind in _LOG_ORDER else len(_LOG_ORDER)


def _steps(log: Mapping[str, Curve]) -> np.ndarray:
    return np.unique(np.concatenate([np.array(curve.steps) for curve in log.values()])) if log else np.array([])


def _last_step(log: Mapping[str, Curve]) -> int:
    return int(max((curve.steps[-1] for curve in log.values() if curve.steps), default=0))
