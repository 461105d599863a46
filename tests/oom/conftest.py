"""The configurations of this folder's tests, and their undisturbed runs.

A test makes a configuration with `tiny` (below), a `Fault` that strikes in one phase of one step (`helpers/faults.py`),
and runs both as `Recorded` (`helpers/harness.py`), whose `failures` are the reports. `recorded.record()` is all that
must be equal in an equal run; `runs.differences` (`helpers/runs.py`) names what differs.
"""

import collections
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import runs
from harness import Record, Recorded

from trainapp.config.schema import Config
from trainapp.parallel.ranks import SingleRank
from trainapp.run.prepare import SessionStart, prepare
from trainapp.signals import StopRequest
from trainapp.training.session import Session

TINY = (*runs.STEPS_ONLY, "train.ema=0.9", "batch.micro_size=8")
MODELS = {
    "mlp": (*runs.MODELS["mlp"], "model.dropout=0.1"),
    # BatchNorm's running statistics change in every forward; augmentation is redrawn every epoch.
    "resnet": runs.MODELS["resnet"],
    # Lengths from 12 to 16: padded, and all in one shape bucket.
    "gpt": (*runs.MODELS["gpt"], "data.min_length=12"),
}
PRECISIONS = {
    "fp32": ("precision=fp32",),
    "bf16": ("precision=bf16",),
    "fp16": ("precision=fp16", "precision.initial_scale=256"),  # low enough that no step is skipped
}


def tiny(
    run_dir: Path, *overrides: str, schedule: dict[int, int] | None = None, changes: Mapping[str, Any] | None = None
) -> Config:
    """TINY with these overrides, this `batch.micro_schedule` and these changes: see `runs.changed`."""
    config = runs.configure(run_dir, *TINY, *overrides)
    return runs.changed(config, {"batch.micro_schedule": schedule, **(changes or {})})


def prepared(config: Config) -> Session:
    """A run that is ready for its next step."""
    return prepare(SessionStart(config), StopRequest(), SingleRank())


def cell(model: str, precision: str) -> tuple[str, ...]:
    """The overrides of a model and a precision of the grid."""
    return (*MODELS[model], *PRECISIONS[precision])


def peak_of(run_dir: Path, overrides: Sequence[str], size: int) -> int:
    """Peak bytes of two steps with this micro-batch."""
    changes = {"batch.micro_size": size, "train.max_steps": 2}
    return Recorded(tiny(run_dir, *overrides, changes=changes)).run.memory.peak


def limit_between(folder: Path, overrides: Sequence[str], fits: int, fails: int) -> int:
    """A limit in bytes under which a micro-batch of `fits` fits and one of `fails` does not."""
    peaks = [peak_of(folder / str(size), overrides, size) for size in (fits, fails)]
    assert peaks[0] + 2 < peaks[1]
    return sum(peaks) // 2


@functools.cache
def operations(*overrides: str) -> collections.Counter:
    """The number of operations in each phase of each step."""
    with tempfile.TemporaryDirectory() as folder:
        return Recorded(tiny(Path(folder), *overrides), counts=True).injector.operations


@functools.cache
def undisturbed(*overrides: str, schedule: tuple[tuple[int, int], ...] = ()) -> Record:
    """The record of a run without errors, which switches sizes by configuration."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = Recorded(tiny(Path(folder), *overrides, schedule=dict(schedule) or None))
        assert not recorded.failures
        return recorded.record()


@pytest.fixture(autouse=True, scope="module")
def few_threads(one_thread):
    """All tests here run in this process."""
