"""A run that follows a plan says, once, when a step contradicts it.

A plan traces the first steps. A model that grows later, or draws from a generator of its own, does something else then,
and no trace can know.
"""

from trainapp.data.forecast import Deviation, Promise
from trainapp.data.promise import deviation
from trainapp.train.run import Run
from trainapp.units import bytes_text

LATE = 3


def compare_with_plan(run: Run) -> None:
    """Call after each clean step, before its sizes count. On the CPU, only steps that were watched have a peak.
    Collective where the sizes follow a plan.
    """
    sizes, attempt = run.sizes.train, run.attempt
    if attempt.step is None or sizes.forecast is None:
        return
    if sizes.is_unproven or attempt.step.is_logged:  # equal on all ranks
        found = deviation(sizes, run.ranks, attempt.peak, _is_typical(run))
        attempt.contradictions = 0 if found is None else attempt.contradictions + 1
        if found is not None and attempt.contradictions >= _needed(run) and run.sizes.plan_note is None:
            run.sizes.plan_note = _note(run, found)
            run.tracker.note(run.sizes.plan_note)
    sizes.compare(run.ranks, attempt.peak)


def _needed(run: Run) -> int:
    """How many steps in a row. gloo's threads may free a message of FSDP a moment late, in one step or another."""
    return LATE if run.ranks.world > 1 and run.config.parallel.strategy == "fsdp" else 1


def _is_typical(run: Run) -> bool:
    """Whether the step has done all that a traced one does. The first one may have created state only at its end."""
    step, config = run.attempt.step, run.config
    assert step is not None
    is_first = run.meter.samples <= step.samples
    is_skipped = run.state.progress.step < step.number
    logs = step.is_logged or config.every.log is None
    return logs and not is_first and not is_skipped and step.samples == run.state.global_size


def note_failure(run: Run, step: int, size: int, limit: int) -> None:
    """Call when memory has run out in training, before the size changes: a planned one has been expected to fit."""
    sizes = run.sizes.train
    if run.sizes.plan_note is not None or sizes.forecast is None or _needed(run) > 1:
        return
    bucket, forecast = sizes.forecast
    if forecast.promise is not None and size == forecast.size and bucket in (None, sizes.current_bucket):
        measured = f"step {step} needs more than {bytes_text(limit)} with micro-batch {size}"
        run.sizes.plan_note = _text(forecast.promise, measured, forecast.promise.most, "a smaller size follows")
        run.tracker.note(run.sizes.plan_note)


def _note(run: Run, found: Deviation) -> str:
    assert run.attempt.step is not None
    assert run.sizes.train.forecast is not None
    promise = run.sizes.train.forecast[1].promise
    assert promise is not None
    is_more = found.measured > found.planned
    advice = "if memory runs out, a smaller size follows" if is_more else "a larger micro-batch may fit"
    measured = f"step {run.attempt.step.number} needs {bytes_text(found.measured)} with micro-batch {found.size}"
    return _text(promise, measured, found.planned, advice)


def _text(promise: Promise, measured: str, planned: int, advice: str) -> str:
    return (
        f"{promise.setting}: {measured}, where {bytes_text(planned)} were planned ({promise.certainty}): the model, "
        "the task or the data do something that the traced steps do not. From now on what is measured counts; "
        f"{advice}, and batch.micro_size=N sets one"
    )
