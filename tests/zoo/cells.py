"""The promise for one cell: recovered equals replayed, resumed equals uninterrupted. Every fault must have struck."""

import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from faults import Fault
from harness import Record
from runs import differences

from .catalogue import ALL
from .harness import Training, check_samples, compare, configure, schedule_of, stop_at

EARLY, LATE = 1, 4
EVALUATING = {"every.eval": 2, "checkpointing.save": False}  # after steps 2 and 4


def finished(name: str, run_dir: Path, changes: dict[str, Any], *faults: Fault) -> Training:
    """A run that must reach its end, after as many errors as there are faults."""
    training = Training(ALL[name], configure(ALL[name], run_dir, changes), *faults)
    if training.error is not None:
        raise training.error
    struck = [(failure.phase.value, failure.step) for failure in training.failures]
    assert sorted(struck) == sorted((fault.phase, fault.step) for fault in faults)
    check_samples(training)
    return training


@functools.cache
def operations(name: str, every: int = 2) -> Counter:
    """The operations of each (phase, step) of an undisturbed run that evaluates `every` so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = configure(ALL[name], Path(folder), {**EVALUATING, "every.eval": every})
        training = Training(ALL[name], config, counts=True)
    if training.error is not None:
        raise training.error
    return training.injector.operations


def fault(name: str, phase: str, step: int, share: float | None = None, every: int = 2) -> Fault:
    """An error `share` of the way through a phase of a step. By default it strikes in the second of two micro-batches,
    or at the end of the first batch of an evaluation, which then has all of its batches in the smaller size.
    """
    if phase == "data":
        return Fault(phase, step)
    if phase == "evaluate" and share is None:
        return Fault(phase, step, operations(name, every)["first evaluation batch", step] - 1)
    return Fault(phase, step, int(operations(name, every)[phase, step] * (share or 0.75)))


def differs_from_its_replay(run: Training, name: str, every: int = 2, exact: bool = True) -> list[str]:
    """Where a run differs from a new one with its `micro_schedule` and the evaluation size that it ended with.

    exact: whether the evaluations must be equal bit for bit: they are where all batches had that size.
    """
    evaluation = run.run.sizes.evaluation.size if any(failure.evaluating for failure in run.failures) else None
    return compare(run.record(), replayed(name, json.dumps(run.schedule), every, evaluation), exact and ALL[name].exact)


@functools.cache
def replayed(name: str, schedule: str, every: int, eval_size: int | None) -> Record:
    """An undisturbed run with these sizes from the start. schedule: as JSON."""
    sizes = {"batch.micro_size": "auto", "batch.micro_schedule": schedule_of(schedule)}
    if eval_size is not None:
        sizes["batch.eval_micro_size"] = eval_size
    with tempfile.TemporaryDirectory() as folder:
        replay = finished(name, Path(folder), {**EVALUATING, "every.eval": every, **sizes})
        return replay.record()


def after_three_errors(name: str, folder: Path) -> list[str]:
    """Out of memory in the first step's forward, in the first evaluation, and in the last step's backward."""
    faults = [fault(name, "forward", EARLY), fault(name, "evaluate", 2), fault(name, "backward", LATE)]
    run = finished(name, folder, EVALUATING, *faults)
    return differs_from_its_replay(run, name)


def after_an_error(name: str, phase: str, step: int, folder: Path) -> list[str]:
    """Out of memory once."""
    every = step if phase == "evaluate" else 2
    changes = {**EVALUATING, "every.eval": every}
    run = finished(name, folder, changes, fault(name, phase, step, every=every))
    return differs_from_its_replay(run, name, every)


def after_an_error_late_in_an_evaluation(name: str, folder: Path) -> list[str]:
    """Only what follows the error is evaluated in smaller batches: equal but for the order of the sum."""
    run = finished(name, folder, EVALUATING, fault(name, "evaluate", 4, share=0.75))
    return differs_from_its_replay(run, name, exact=False)


def resumed(name: str, folder: Path) -> list[str]:
    """Where a run that a signal stopped in its second step and that was resumed differs from one that was not."""
    changes = {"every.eval": 2}
    config = configure(ALL[name], folder / "resumed", changes)
    first = Training(ALL[name], config, on_batch=stop_at(1))
    assert isinstance(first.error, SystemExit), first.error
    assert first.run.state.progress.step == 2
    second = Training(ALL[name], config)
    if second.error is not None:
        raise second.error
    whole = finished(name, folder / "whole", changes)
    second.trained = {**first.trained, **second.trained}
    check_samples(second)
    return compare(second.record(), whole.record()) + differences(second.trained, whole.trained, "samples")
