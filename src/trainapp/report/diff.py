"""`trainapp diff RUN_A RUN_B`: what differs between two runs, as text for a terminal, and in one sentence at the end.
Imports torch only to compare weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainapp.config.resume_rules import Change
from trainapp.errors import UserError
from trainapp.files import CHECKPOINTS, RECIPE, shown
from trainapp.report import differences, run_files
from trainapp.report.differences import LogDifference, Pair, RunRecord, ScalarDifference, kind_of
from trainapp.units import listed, plural

if TYPE_CHECKING:
    from trainapp.checkpoint.comparison import CheckpointDifference

IDENTICAL, DIFFERENT, NOTHING_COMPARED = 0, 1, 2  # exit codes, as those of diff
# The largest relative difference that other roundings alone explain, by dtype; its growth over many steps exceeds it.
_ROUNDING_BY_DTYPE = {"float64": 1e-10, "float32": 1e-4}
_ROUNDING = 1e-2  # of any other dtype
_JUDGED = ("loss", "lr", "grad_norm")  # continuous: a metric such as accuracy jumps where a rounding decides
_MOST_ROWS = 10  # per table
_LONGEST = 60  # characters of a value
# Entries of a checkpoint besides tensors, as users know them.
_STATES = {
    "progress": "counts of steps and samples, or the objective and the best evaluation",
    "stateful": "state of the task, the data or callbacks: their buffers, generators and state_dict",
    "scaler": "the loss scale",
    "sampler": "the position in the data",
    "schedule": "the schedule",
    "average_step": "the step of the weight average",
    "updates": "the names of the updates",
    "class_names": "the names of classes",
    "filled": "sizes filled in from the data",
    "rows_by_rank": "per_sample_buffers",
}
_FINER_LOG = "rerun with every.log=1 to see the exact step"


@dataclass(frozen=True)
class Comparison:
    """Two runs and how they differ. Settings, recipe and micro-batches are None where the files of one of the runs do
    not tell.
    """

    a: RunRecord
    b: RunRecord
    steps: tuple[int, int]  # that A and B have trained, up to the compared one
    settings: list[Change] | None
    environment: list[Pair]
    recipe: list[Pair] | None
    train: LogDifference
    evaluations: LogDifference
    micro_batches: list[Pair] | None
    dependence: list[str]  # why other micro-batch sizes give another result, where the runs know it and sizes differ
    other_sizes: int | None  # the first step, counted with skipped ones, with other sizes; None if no file tells
    weights: "CheckpointDifference | None"  # None if they were not compared
    no_weights: str  # why they were not compared
    rounding: float  # the largest relative difference that counts as rounding


def show(a: Path, b: Path, which: int | str | None) -> int:
    """Print how two runs differ. Returns the exit code: IDENTICAL, DIFFERENT or NOTHING_COMPARED.

    Raises UserError for a directory without a run, and for a checkpoint that is missing or damaged.

    Args:
        a: the directory of a run.
        b: that of the other.
        which: see `checkpoint.comparison.choose`; with a step, nothing after it is compared.
    """
    for run in (a, b):
        if not run_files.is_run(run):
            raise UserError(f"trainapp diff: {run}: not a run directory; give the directories of two runs")
    comparison = compare(a, b, which)
    sentence, code = verdict(comparison)
    for line in lines_of(comparison):
        print(line)
    print(f"\n{sentence}")
    return code


def compare(a: Path, b: Path, which: int | str | None = None) -> Comparison:
    """Compare two runs. Arguments and errors: see `show`."""
    last_step = which if isinstance(which, int) else None
    record_of_a = differences.read_record(a, last_step)
    record_of_b = differences.read_record(b, last_step)
    records = (record_of_a, record_of_b)

    # How far each has trained, up to the requested step.
    steps_of_a = record_of_a.steps
    steps_of_b = record_of_b.steps
    if last_step is not None:
        steps_of_a = min(steps_of_a, last_step)
        steps_of_b = min(steps_of_b, last_step)

    weights, no_weights = _compare_weights(a, b, which)

    # The coarsest dtype of the two runs decides what may be rounding.
    dtypes = differences.dtypes(record_of_a) | differences.dtypes(record_of_b)
    if not dtypes:  # no file tells
        dtypes = {"float32"}
    rounding = max(_ROUNDING_BY_DTYPE.get(dtype, _ROUNDING) for dtype in dtypes)
    return Comparison(
        a=record_of_a,
        b=record_of_b,
        steps=(steps_of_a, steps_of_b),
        settings=differences.settings(*records),
        environment=differences.environment(*records),
        recipe=differences.recipe(*records),
        train=differences.logs(record_of_a.train, record_of_b.train),
        evaluations=differences.logs(record_of_a.evaluations, record_of_b.evaluations),
        micro_batches=differences.micro_batches(*records),
        dependence=differences.dependence_on_micro_batch(*records),
        other_sizes=differences.first_other_sizes(*records),
        weights=weights,
        no_weights=no_weights,
        rounding=rounding,
    )


def _compare_weights(a: Path, b: Path, which: int | str | None) -> "tuple[CheckpointDifference | None, str]":
    """Return how the weights differ, or None and why they were not compared."""
    without_checkpoint = []
    for name, run in (("A", a), ("B", b)):
        checkpoints = run.glob(f"{CHECKPOINTS}/step_*")
        if not any(checkpoints):
            without_checkpoint.append(name)
    if without_checkpoint and which is None:
        verb = "have" if len(without_checkpoint) > 1 else "has"
        return None, f"{' and '.join(without_checkpoint)} {verb} no checkpoint"
    from trainapp.checkpoint import comparison  # late: it imports torch

    try:
        checkpoint_of_a, checkpoint_of_b = comparison.choose(a, b, which)
        return comparison.compare(checkpoint_of_a, checkpoint_of_b), ""
    except UserError as error:  # what was logged can be compared without them
        if which is not None:
            raise
        return None, str(error)


# --- the text


def lines_of(comparison: Comparison) -> Iterator[str]:
    """Yield the text without the last sentence."""
    yield from _aligned([_run_row("A", comparison.a), _run_row("B", comparison.b)])

    # How they were started.
    settings = None
    if comparison.settings is not None:
        settings = [Pair(change.name, change.before, change.now) for change in comparison.settings]
    yield from _pairs_section("settings", settings, "no file has the settings of both in the same form")
    yield from _pairs_section("versions and hosts", comparison.environment)
    yield from _pairs_section("entries of the recipe", comparison.recipe, f"at least one run has no {RECIPE}")

    # What they computed.
    yield from _log_section("training", comparison.train)
    yield from _log_section("evaluations", comparison.evaluations)
    yield from _evaluations_of_one(comparison)
    yield from _pairs_section("micro-batches and retries", comparison.micro_batches, "at least one run has not ended")
    yield from _weights_section(comparison)


def _run_row(name: str, record: RunRecord) -> list[str]:
    state = run_files.state_of(record.result) or "not finished"
    if "steps" in record.result:
        state += f", {plural(record.result['steps'], 'step')}"
    if record.resumes:
        steps = [str(step) for step in record.resumes]
        state += f", resumed after step {listed(steps, _MOST_ROWS)}"
    return [name, shown(record.run_dir), state]


def _pairs_section(title: str, pairs: Sequence[Pair] | None, unknown: str = "") -> Iterator[str]:
    """Yield a section of values that differ. unknown: why there are none to compare, if `pairs` is None."""
    if pairs is None:
        yield f"\n{title}: not compared, {unknown}"
    elif not pairs:
        yield f"\n{title}: equal"
    else:
        yield f"\n{title} that differ"
        rows = []
        for pair in pairs:
            text_of_a, text_of_b = _shortened(pair.a, pair.b)
            rows.append([f"  {pair.name}", f"{text_of_a} -> {text_of_b}"])
        yield from _aligned(rows)


def _log_section(title: str, log: LogDifference) -> Iterator[str]:
    if not log.steps:
        yield f"\n{title}: not compared, no step was logged by both"
        return
    yield f"\n{title}: {plural(len(log.steps), 'step')} logged by both, the last is {log.steps[-1]}"

    # Scalars that differ.
    if log.scalars:
        header = ["  scalar", "first differs", "A", "B", "relative", "largest relative"]
        rows = [_scalar_row(scalar) for scalar in log.scalars[:_MOST_ROWS]]
        yield from _aligned([header, *rows])
    if len(log.scalars) > _MOST_ROWS:
        yield f"  and {len(log.scalars) - _MOST_ROWS} more"

    # All others, by name alone.
    for note, names in (("equal", log.equal), ("only in A", log.only_in_a), ("only in B", log.only_in_b)):
        if names:
            yield f"  {note}: {listed(names, _MOST_ROWS)}"


def _scalar_row(scalar: ScalarDifference) -> list[str]:
    return [
        f"  {scalar.name}",
        f"step {scalar.step}",
        repr(scalar.a),
        repr(scalar.b),
        f"{scalar.relative:.2g}",
        f"{scalar.largest:.2g} at step {scalar.largest_step}",
    ]


def _evaluations_of_one(comparison: Comparison) -> Iterator[str]:
    """Yield the steps, as far as both runs go, after which only one of them was evaluated."""
    log = comparison.evaluations
    end = min(comparison.steps)
    for name, steps in (("A", log.steps_only_in_a), ("B", log.steps_only_in_b)):
        texts = [str(step) for step in steps if step <= end]
        if texts:
            noun = "step" if len(texts) == 1 else "steps"
            yield f"  evaluated only in {name}: {noun} {listed(texts, _MOST_ROWS)}"


def _weights_section(comparison: Comparison) -> Iterator[str]:
    weights = comparison.weights
    if weights is None:
        yield f"\nweights: not compared, {comparison.no_weights}"
        return

    # Tensors of the model.
    step_of_a, step_of_b = weights.steps
    steps = f"of step {step_of_a}"
    if step_of_a != step_of_b:
        steps += f" in A and {step_of_b} in B"
    tensors = f"{plural(weights.equal, 'tensor')} equal bit for bit, {len(weights.weights)} not"
    yield f"\nweights {steps}: {tensors}"
    yield from _tensor_rows(weights)
    for note, names in (("only in A", weights.only_in_a), ("only in B", weights.only_in_b)):
        if names:
            yield f"  {note}: {listed(names, _MOST_ROWS)}"

    # What else is in the checkpoints.
    if not weights.has_equal_values:
        yield "  values beside the tensors, or the frozen base of adapters, differ"
    optimizer_state = "equal bit for bit" if weights.has_equal_optimizer else "differs"
    yield f"  the optimizer's state: {optimizer_state}"
    if weights.others:
        names = [_STATES.get(name, name) for name in weights.others]
        yield f"  further state that differs: {'; '.join(names)}"


def _tensor_rows(weights: "CheckpointDifference") -> Iterator[str]:
    """Yield the tensors that differ, in values or in shape."""
    # Tensors of equal shape, with the distance of their values.
    if weights.weights:
        rows = [["  tensor", "largest", "relative"]]
        for tensor in weights.weights[:_MOST_ROWS]:
            dtypes = ""
            if tensor.dtypes is not None:
                dtypes = " -> ".join(tensor.dtypes)
            rows.append([f"  {tensor.name}", f"{tensor.largest:.2g}", f"{tensor.relative:.2g}", dtypes])
        yield from _aligned(rows)
    if len(weights.weights) > _MOST_ROWS:
        yield f"  and {len(weights.weights) - _MOST_ROWS} more"

    # Tensors of different shapes, whose values cannot be compared.
    for name, shape_of_a, shape_of_b in weights.shapes[:_MOST_ROWS]:
        yield f"  {name}: shape {shape_of_a} -> {shape_of_b}"
    if len(weights.shapes) > _MOST_ROWS:
        yield f"  and {len(weights.shapes) - _MOST_ROWS} more of other shapes"


def _shortened(a: str, b: str) -> tuple[str, str]:
    """Return two different texts, both cut, if one is long, to begin a little before the first difference."""
    if max(len(a), len(b)) <= _LONGEST:
        return a, b
    difference = _first_difference(a, b)
    start = max(0, difference - _LONGEST // 2)
    return _excerpt(a, start), _excerpt(b, start)


def _first_difference(a: str, b: str) -> int:
    """Return the position of the first character in which the texts differ."""
    for position, (character_of_a, character_of_b) in enumerate(zip(a, b, strict=False)):
        if character_of_a != character_of_b:
            return position
    return min(len(a), len(b))


def _excerpt(text: str, start: int) -> str:
    """Return at most `_LONGEST` characters of a text, from `start` on."""
    if start > 0:
        text = "..." + text[start:]
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 3] + "..."
    return text


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows with columns of equal width."""
    # Rows may have fewer cells than others.
    column_count = max(len(row) for row in rows)
    widths = [0] * column_count
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], len(cell))

    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join(padded).rstrip()


# --- the last sentence


def verdict(comparison: Comparison) -> tuple[str, int]:
    """Return the comparison in one sentence, and the exit code."""
    train = comparison.train
    evaluations = comparison.evaluations
    weights = _weights_of_one_step(comparison)
    if not train.steps and not evaluations.steps and weights is None:
        reason = "the runs logged no common step, and have no checkpoints of the same step"
        return f"nothing to compare: {reason}", NOTHING_COMPARED

    # Different: in what was compared, or in length.
    steps_of_a, steps_of_b = comparison.steps
    has_other_length = steps_of_a != steps_of_b
    lengths = f"A has trained {plural(steps_of_a, 'step')}, B {steps_of_b}"
    weights_differ = weights is not None and not weights.is_equal
    if train.scalars or evaluations.scalars or weights_differ:
        sentence = _describe_difference(comparison)
        if has_other_length:
            sentence += f"; {lengths}"
        return sentence, DIFFERENT
    if has_other_length:
        return f"identical bit for bit as far as both go; {lengths}", DIFFERENT

    # Identical in everything that was compared.
    if weights is None:
        return "identical bit for bit in all logged values; the weights were not compared", IDENTICAL
    state = f"weights and optimizer of step {weights.steps[0]}"
    if train.steps or evaluations.steps:
        return f"identical bit for bit: all logged values, {state}", IDENTICAL
    return f"identical bit for bit: {state}; no step was logged by both", IDENTICAL


def _weights_of_one_step(comparison: Comparison) -> "CheckpointDifference | None":
    """Return the difference of the weights if both checkpoints are of the same step, or None: weights of different
    steps differ anyway.
    """
    weights = comparison.weights
    if weights is None:
        return None
    step_of_a, step_of_b = weights.steps
    return weights if step_of_a == step_of_b else None


def _describe_difference(comparison: Comparison) -> str:
    """Return one sentence: whether runs that differ do so by rounding alone, or from which step on."""
    # How large the differences are.
    scalars = [*comparison.train.scalars, *comparison.evaluations.scalars]
    judged = [scalar for scalar in scalars if kind_of(scalar.name) in _JUDGED]
    relative_differences = [scalar.largest for scalar in judged]
    weights = _weights_of_one_step(comparison)
    if weights is not None:
        relative_differences.append(weights.relative if weights.has_same_tensors else math.inf)
    largest = max(relative_differences, default=0.0)
    is_small = 0 < largest <= comparison.rounding

    # Rounding alone, unless something that changes the result is known to differ.
    changes = [change.name for change in comparison.settings or () if change.is_another_experiment]
    dependence = _dependence(comparison)
    start = _start(comparison)
    circumstances = _circumstances(comparison)
    if is_small and not changes and not dependence:
        text = "; ".join([start, *circumstances])
        return (
            f"the same up to rounding, {text}; the largest relative difference of loss, lr, grad_norm "
            f"and all weights together is {largest:.2g}"
        )

    # Where the difference begins, and its cause or where to look for it.
    reasons = [dependence] if dependence else [*circumstances, *_advice(comparison)]
    sentence = f"different {start}"
    if reasons:
        sentence += f": {'; '.join(reasons)}"

    # Evidence for rounding all the same.
    if is_small:
        sentence += f"; within rounding ({largest:.2g} at most)"
        if changes:
            sentence += f", but these settings change the result: {listed(changes, most=4)}"
    elif judged and not changes:
        largest_at_first = max(scalar.relative for scalar in judged)
        if largest_at_first <= comparison.rounding:
            sentence += "; the first difference is as small as rounding, then it grows"
    return sentence


def _start(comparison: Comparison) -> str:
    """Return from where on the runs differ: `from step 3 on (loss)`."""
    log = comparison.train
    where = ""
    if not log.scalars:
        log = comparison.evaluations
        where = ", in evaluations alone"
    if not log.scalars:
        assert comparison.weights is not None
        return f"in the checkpoints of step {comparison.weights.steps[0]} alone (all logged values are equal)"
    step = log.scalars[0].step
    names = [scalar.name for scalar in log.scalars if scalar.step == step]
    return f"from step {step} on{where} ({listed(names)})"


def _first_step(comparison: Comparison) -> int | None:
    """Return the first step in which logged values differ, or None."""
    scalars = comparison.train.scalars or comparison.evaluations.scalars
    return scalars[0].step if scalars else None


def _dependence(comparison: Comparison) -> str:
    """Return why the sizes of the micro-batches explain the difference; empty if they do not: if they are equal up to
    the step in which it begins, or if the runs know of nothing that depends on them.
    """
    other_sizes = comparison.other_sizes
    if other_sizes is None or not comparison.dependence:
        return ""
    step = _first_step(comparison)
    if step is not None and comparison.a.attempt_of(step) < other_sizes:
        return ""
    return f"the sizes of the micro-batches differ from step {other_sizes} on, and {comparison.dependence[0]}"


def _circumstances(comparison: Comparison) -> list[str]:
    """Return in what the runs' computation differs where they begin to differ: sizes of micro-batches, ranks, and
    whether one was resumed.
    """
    step = _first_step(comparison)
    if step is None:
        return []
    texts = []

    # Sizes that differ only after this step are listed, too, but are not the cause.
    other_sizes = comparison.other_sizes
    if other_sizes is not None:
        is_later = comparison.a.attempt_of(step) < other_sizes
        only = "only " if is_later else ""
        texts.append(f"the sizes of the micro-batches differ {only}from step {other_sizes} on")

    ranks_of_a = comparison.a.ranks_of(step)
    ranks_of_b = comparison.b.ranks_of(step)
    if ranks_of_a is not None and ranks_of_b is not None and ranks_of_a != ranks_of_b:
        texts.append(f"step {step} was computed by {plural(ranks_of_a, 'rank')} in A, by {ranks_of_b} in B")

    for name, after_step in _resumes_before(comparison, step):
        texts.append(f"{name} was resumed after step {after_step}")
    return texts


def _may_mix_samples(comparison: Comparison, step: int) -> bool:
    """Return whether a run with an embedding loss has split this step differently from the other one."""
    checks = [*comparison.a.recipe.get("checks", ()), *comparison.b.recipe.get("checks", ())]
    has_embeddings = any(name.startswith("embeddings") for name in checks)
    if not has_embeddings:
        return False
    if comparison.a.ranks_of(step) != comparison.b.ranks_of(step):
        return True
    first_other_size = comparison.other_sizes
    return first_other_size is not None and first_other_size <= comparison.a.attempt_of(step)


def _resumes_before(comparison: Comparison, step: int) -> list[tuple[str, int]]:
    """Return the resumes that may be the cause of a difference in a step: the run, A or B, and the step before the
    resume. If values were equal in step n, these are the resumes after it, and that before it, whose first update is
    that of step n.
    """
    equal_step = comparison.train.step_before(step) or 0
    resumes = []
    for name, record in (("A", comparison.a), ("B", comparison.b)):
        for after_step in record.resumes:
            if equal_step - 1 <= after_step < step:
                resumes.append((name, after_step))
    return resumes


def _advice(comparison: Comparison) -> list[str]:
    """Return where to look for the cause; empty where the log does not tell."""
    train = comparison.train
    if not train.scalars:
        return []
    step = train.scalars[0].step
    kinds = {kind_of(scalar.name) for scalar in train.scalars if scalar.step == step}

    # What differs first shows which part of a step is the cause.
    if "lr" in kinds:
        return ["look at the learning rate and its schedule"]
    if "loss" in kinds and step == 1:
        advice = ["look at the data, the initial weights, the loss and the precision"]
        if _may_mix_samples(comparison, step):
            advice.append(
                "of the embedding loss, also at its embed and the model: a row must not depend on the other samples "
                "of a micro-batch, as it does if it is normalised over them (docs/extending.md)"
            )
        return advice
    if "grad_norm" in kinds and step == 1:
        return ["the loss is equal, look at the backward (precision, micro-batches, recomputation)"]

    # If the previous step was not logged by both, the difference may have begun earlier.
    equal_step = train.step_before(step)
    if equal_step is None:
        return [f"no earlier step was logged by both; {_FINER_LOG}"] if step > 1 else []
    if equal_step < step - 1:
        return [f"all was equal in step {equal_step}; {_FINER_LOG}"]

    # Otherwise it began between the two steps: with a resume or with the update.
    if not kinds & {"loss", "grad_norm"}:
        return []
    resumed_after = [after_step for _, after_step in _resumes_before(comparison, step)]
    if equal_step in resumed_after:
        return [
            f"all was equal up to step {equal_step}: look at what the resume changed, at state that is in no "
            f"checkpoint, and at the samples of step {step}"
        ]
    return [f"look at the update of step {equal_step} (the optimizer, its options) and the samples of step {step}"]
