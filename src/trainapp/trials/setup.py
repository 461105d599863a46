"""What the trials of a run are made with."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainapp.config.schema import Train
from trainapp.trials.modes import Mode
from trainapp.trials.samples import FirstSamples


@dataclass(frozen=True)
class TrialSetup:
    """The model, its tasks and the samples that they are called with."""

    settings: Train  # the seed; whether the loss is checked; whose the draws are
    model: nn.Module  # neither compiled nor sharded yet
    modes: list[Mode]  # the tasks, and how each is called
    samples: FirstSamples
    device: torch.device  # of the calls
    autocast: contextlib.AbstractContextManager[Any]  # of forward and loss in training
    metric_names: frozenset[str]  # of the metrics in `metrics`, whose values are objects rather than numbers
    resumes: bool  # whether a checkpoint is restored after the trials
