"""What differs between two runs, from their files alone, as plain values. Imports no torch.

A run that has not ended, has failed or was killed has only some of the files: what cannot be compared is None.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainapp.config.resume_rules import Change, changes
from trainapp.files import COMMAND, EVALUATIONS, METRICS, RECIPE, RESULT, json_object
from trainapp.report import run_files
from trainapp.report.run_files import Curve
from trainapp.tracking.scalars import is_machine_scalar

_LOG_ORDER = ("lr", "loss", "grad_norm")  # of scalars that begin to differ in one step: the cause before its effect
_ENVIRONMENT = ("host", "python", "torch", "trainapp")
_NOT_RECORDED = "not recorded"


class Pair(NamedTuple):
    """A named value of both runs, as text."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class RunRecord:
    """What the files of a run say, as far as runs are compared. What a missing file would say is empty."""

    run_dir: Path
    settings: dict[str, Any]  # as composed from the command line
    manifest: dict[str, Any]  # of the newest checkpoint
    command: dict[str, Any]  # how and with what its last process was started
    recipe: dict[str, Any]
    result: dict[str, Any]
    train: dict[str, Curve]  # by scalar
    evaluations: dict[str, Curve]

    @property
    def steps(self) -> int:
        """How many steps the run has trained; of one that has not ended, the last that it has logged."""
        steps: int = self.result.get("steps", _last_step(self.train))
        return steps

    @property
    def resumes(self) -> list[int]:
        """The steps after which the run was resumed, as far as its recipe tells."""
        return [resume["after_step"] for resume in self.recipe.get("resumes", ())]

    def ranks_of(self, step: int) -> int | None:
        """Return the number of ranks that computed a step; None if no file tells."""
        for resume in self.recipe.get("resumes", ()):
            if step <= resume["after_step"]:
                ranks_before: int | None = resume["ranks_before"]
                return ranks_before
        ranks: int | None = self.recipe.get("batch", {}).get("ranks")
        return ranks

    def attempt_of(self, step: int) -> int:
        """Return the number of the attempt that made a step: skipped steps, as last logged, are attempts, too."""
        skipped_steps = self.train.get("skipped_steps")
        if skipped_steps is None:
            return step
        skipped = 0.0
        for logged_step, value in zip(skipped_steps.steps, skipped_steps.values, strict=True):
            if logged_step <= step and math.isfinite(value):
                skipped = value
        return step + int(skipped)

    @property
    def sizes_by_attempt(self) -> dict[str, dict[int, Any]]:
        """The micro-batch sizes by update ("" for a step's only one) and by the attempt from which they apply."""
        schedule = self.result.get("micro_schedule") or {}
        is_of_one_update = all(str(key).isdigit() for key in schedule)
        if is_of_one_update:
            schedule = {"": schedule}
        sizes = {}
        for update, size_by_attempt in schedule.items():
            sizes[update] = {int(attempt): size for attempt, size in size_by_attempt.items()}
        return sizes


def read_record(run_dir: Path, last_step: int | None) -> RunRecord:
    """Read the files of a run. last_step: the last one to read of what was logged; None: all."""
    return RunRecord(
        run_dir=run_dir,
        settings=run_files.composed_settings(run_dir),
        manifest=run_files.newest_manifest(run_dir),
        command=json_object(run_dir / COMMAND),
        recipe=json_object(run_dir / RECIPE),
        result=json_object(run_dir / RESULT),
        train=_read_log(run_dir / METRICS, last_step),
        evaluations=_read_log(run_dir / EVALUATIONS, last_step),
    )


def _read_log(path: Path, last_step: int | None) -> dict[str, Curve]:
    """Return the scalars that tell what a run computed, not how fast or in how much memory."""
    curves = run_files.curves_in(path)
    return {name: curve.until(last_step) for name, curve in curves.items() if not is_machine_scalar(name)}


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
        value_of_a = np.array([self.a])
        value_of_b = np.array([self.b])
        return float(relative_differences(value_of_a, value_of_b)[0])


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
        earlier_steps = [earlier for earlier in self.steps if earlier < step]
        return max(earlier_steps, default=None)


# --- settings and the environment


def settings(a: RunRecord, b: RunRecord) -> list[Change] | None:
    """Return the settings that differ; None if no file has the settings of both runs in the same form."""
    if a.settings and b.settings:
        return changes(a.settings, b.settings)
    checkpointed_of_a = a.manifest.get("config")
    checkpointed_of_b = b.manifest.get("config")
    if checkpointed_of_a and checkpointed_of_b:
        return changes(checkpointed_of_a, checkpointed_of_b)
    return None


def dtypes(record: RunRecord) -> set[str]:
    """Return the dtypes in which the run computes, as far as its files tell: of a model in fp64, `float64`."""
    precision = record.recipe.get("precision") or {}
    if "computes_in" in precision:
        return set(precision["computes_in"].split(" and "))

    # Without a recipe: the setting, which knows nothing of the model's own dtype.
    configuration = record.settings or record.manifest.get("config") or {}
    mode = (configuration.get("precision") or {}).get("mode")
    if mode is None:
        return set()
    return {"float32"} if mode in ("fp32", "tf32") else {"bfloat16"}


def environment(a: RunRecord, b: RunRecord) -> list[Pair]:
    """Return versions, hosts and numbers of ranks that differ, as far as both runs have recorded them."""
    facts_of_a = _environment(a)
    facts_of_b = _environment(b)
    common_of_a = {}
    common_of_b = {}
    for name in facts_of_a:
        if name in facts_of_b:
            common_of_a[name] = facts_of_a[name]
            common_of_b[name] = facts_of_b[name]
    return _pairs(common_of_a, common_of_b)


def _environment(record: RunRecord) -> dict[str, Any]:
    recorded = record.manifest.get("versions", {}) | record.command
    facts = {name: recorded[name] for name in _ENVIRONMENT if name in recorded}
    if "ranks" in record.manifest:
        facts["ranks"] = record.manifest["ranks"]
    return facts


def recipe(a: RunRecord, b: RunRecord) -> list[Pair] | None:
    """Return the values in recipe.json that differ, apart from resumes; None unless both runs have one."""
    if not (a.recipe and b.recipe):
        return None
    recipe_of_a = {**a.recipe, "resumes": None}
    recipe_of_b = {**b.recipe, "resumes": None}
    values_of_a = dict(_each_value(recipe_of_a))
    values_of_b = dict(_each_value(recipe_of_b))
    return _pairs(values_of_a, values_of_b)


def _each_value(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts and lists by dotted name. A list of plain values is one value."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _each_value(value, f"{name}.{key}" if name else key)
    elif isinstance(node, list) and any(isinstance(value, (dict, list)) for value in node):
        for number, value in enumerate(node):
            yield from _each_value(value, f"{name}.{number}")
    else:
        yield name, node


def micro_batches(a: RunRecord, b: RunRecord) -> list[Pair] | None:
    """Return how micro-batch sizes and retries after out-of-memory errors differ; None unless both runs have ended."""
    if not (a.result and b.result):
        return None
    return _pairs(_micro_batches(a.result), _micro_batches(b.result))


def _micro_batches(result: Mapping[str, Any]) -> dict[str, Any]:
    turned_on = {}
    for entry in result.get("turned_on") or ():
        turned_on[str(entry["attempt"])] = entry["settings"]
    return {
        "sizes by step": result.get("micro_schedule"),
        "OOM retries": result.get("oom_restarts"),
        "techniques turned on, by step": turned_on,
    }


def dependence_on_micro_batch(a: RunRecord, b: RunRecord) -> list[str]:
    """Return why runs of these micro-batch sizes differ, as far as the runs know; empty for equal sizes."""
    if a.result.get("micro_schedule") == b.result.get("micro_schedule"):
        return []
    reasons: dict[str, None] = {}  # in order, each once
    for record in (a, b):
        reasons |= dict.fromkeys(record.result.get("depends_on_micro_batch", ()))
    return list(reasons)


def first_other_sizes(a: RunRecord, b: RunRecord) -> int | None:
    """Return the first attempt in which the sizes of the micro-batches differ; None if they never do, or if no file
    tells.
    """
    sizes_of_a = a.sizes_by_attempt
    sizes_of_b = b.sizes_by_attempt

    # Sizes change only at the attempts listed in either schedule.
    differing_attempts = []
    for update in sizes_of_a.keys() & sizes_of_b.keys():
        schedule_of_a = sizes_of_a[update]
        schedule_of_b = sizes_of_b[update]
        for attempt in schedule_of_a.keys() | schedule_of_b.keys():
            if _size_in(schedule_of_a, attempt) != _size_in(schedule_of_b, attempt):
                differing_attempts.append(attempt)
    return min(differing_attempts, default=None)


def _size_in(sizes_by_attempt: Mapping[int, Any], attempt: int) -> Any:
    """Return the size that applies in an attempt; None before the first."""
    begun = [first for first in sizes_by_attempt if first <= attempt]
    if not begun:
        return None
    return sizes_by_attempt[max(begun)]


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Pair]:
    """Return the values that differ."""
    pairs = []
    for name in {**a, **b}:
        value_of_a = a.get(name, _NOT_RECORDED)
        value_of_b = b.get(name, _NOT_RECORDED)
        if value_of_a != value_of_b:
            pairs.append(Pair(name, run_files.typed(value_of_a), run_files.typed(value_of_b)))
    return pairs


# --- what was logged


def logs(a: Mapping[str, Curve], b: Mapping[str, Curve]) -> LogDifference:
    """Compare what two runs have logged in the steps that both have logged."""
    # Scalars that both have, likely causes first.
    differing = []
    equal = []
    for name in a.keys() & b.keys():
        difference = _compare_scalar(name, a[name], b[name])
        if difference is None:
            equal.append(name)
        else:
            differing.append(difference)
    differing.sort(key=lambda scalar: (scalar.step, _rank(scalar.name), scalar.name))
    equal.sort(key=lambda name: (_rank(name), name))

    steps_of_a = _steps(a)
    steps_of_b = _steps(b)
    return LogDifference(
        steps=[int(step) for step in np.intersect1d(steps_of_a, steps_of_b)],
        last_steps=(_last_step(a), _last_step(b)),
        scalars=differing,
        equal=equal,
        only_in_a=sorted(a.keys() - b.keys()),
        only_in_b=sorted(b.keys() - a.keys()),
        steps_only_in_a=[int(step) for step in np.setdiff1d(steps_of_a, steps_of_b)],
        steps_only_in_b=[int(step) for step in np.setdiff1d(steps_of_b, steps_of_a)],
    )


def _compare_scalar(name: str, a: Curve, b: Curve) -> ScalarDifference | None:
    """Compare one scalar; None if it is equal in all steps that both have."""
    steps, positions_in_a, positions_in_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    values_of_a = np.array(a.values)[positions_in_a]
    values_of_b = np.array(b.values)[positions_in_b]
    is_equal = _are_equal(values_of_a, values_of_b)
    if is_equal.all():
        return None

    # Positions among the common steps.
    first = int(is_equal.argmin())
    relative = relative_differences(values_of_a, values_of_b)
    largest = int(relative.argmax())
    return ScalarDifference(
        name=name,
        step=int(steps[first]),
        a=float(values_of_a[first]),
        b=float(values_of_b[first]),
        largest=float(relative[largest]),
        largest_step=int(steps[largest]),
    )


def relative_differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b| / max(|a|, |b|): 0 where both are equal or nan, inf where only one is finite."""
    scale = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(a - b) / scale
    relative[_are_equal(a, b)] = 0.0
    relative[np.isnan(a) != np.isnan(b)] = math.inf
    return relative


def _are_equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a mask of the values that are equal or both nan."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def kind_of(name: str) -> str:
    """Return what a scalar is, without the name of its update, parameter group or validation set: `lr` of `lr/head`."""
    parts = name.split("/")
    for part in parts:
        if part in _LOG_ORDER:
            return part
    return parts[-1]


def _rank(name: str) -> int:
    """Return the position of a scalar among those that begin to differ in one step."""
    kind = kind_of(name)
    if kind not in _LOG_ORDER:
        return len(_LOG_ORDER)
    return _LOG_ORDER.index(kind)


def _steps(log: Mapping[str, Curve]) -> np.ndarray:
    """Return all steps in which something was logged."""
    if not log:
        return np.array([])
    steps_of_curves = [np.array(curve.steps) for curve in log.values()]
    return np.unique(np.concatenate(steps_of_curves))


def _last_step(log: Mapping[str, Curve]) -> int:
    last_steps = [curve.steps[-1] for curve in log.values() if curve.steps]
    return int(max(last_steps, default=0))
