"""Configurations, composed once for all tests of this folder: composing costs more than a tiny run."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import runs

from trainapp.config import compose
from trainapp.config.schema import Config
from trainapp.parallel.ranks import SingleRank
from trainapp.run import runner
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


@functools.cache
def composed(*overrides: str) -> Config:
    """The configuration of `trainapp OVERRIDES`, cached."""
    return compose.from_command_line(overrides)


def tiny(
    run_dir: Path, *overrides: str, schedule: dict[int, int] | None = None, changes: Mapping[str, Any] | None = None
) -> Config:
    """TINY with these overrides and this `batch.micro_schedule`, in `run_dir`.

    changes: settings of sections such as `batch.global_size`, and constructor arguments such as `data.size`, set
    without recomposing.
    """
    config = composed(*TINY, *overrides)
    for name, value in {"batch.micro_schedule": schedule, **(changes or {})}.items():
        section, key = name.split(".")
        part = getattr(config, section)
        if section in ("data", "model"):
            change = {"arguments": {**part.arguments, key: value}}
        else:
            change = {key: value}
        config = dataclasses.replace(config, **{section: dataclasses.replace(part, **change)})
    return dataclasses.replace(config, run_dir=str(run_dir))


def prepared(config: Config) -> Session:
    """A run that is ready for its next step."""
    return runner.prepare(config, StopRequest(), SingleRank())


def cell(model: str, precision: str) -> tuple[str, ...]:
    """The overrides of a model and a precision of the grid."""
    return (*MODELS[model], *PRECISIONS[precision])


@pytest.fixture(autouse=True, scope="module")
def few_threads(one_thread):
    """All tests here run in this process."""
