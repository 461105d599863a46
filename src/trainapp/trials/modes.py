"""What the trials of a run are made with: the modes in which it calls its tasks (in evaluation, and in training for
each update), and with which samples.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainapp.config.schema import Train
from trainapp.draws.record import EVALUATION
from trainapp.losses.losses import CheckedTask, has_embeddings
from trainapp.torch_private import has_values
from trainapp.training.engine import training_draws
from trainapp.trials.samples import FirstSamples

NO_CHECK_NEEDED = "no check needed, since task and model are trainapp's own"

OF_CHECKPOINT = "those of the resumed checkpoint"  # the draws of a resumed run


class Mode(NamedTuple):
    """A task and how it is called."""

    task: CheckedTask
    work: str  # names its draws in the record
    training: bool  # whether the model is in training mode
    update: str = ""  # the name of its update, if any

    @property
    def is_trained(self) -> bool:
        """Whether a run calls the task with gradients."""
        return self.work != EVALUATION

    @property
    def compares_embeddings(self) -> bool:
        """Whether what is compared are the embeddings of an embedding loss: see `trials.probe`."""
        return has_embeddings(self.task)

    def check_name(self, subject: str) -> str:
        """Return the name in the recipe of a check of its "loss", "padding", "embeddings", "padded_embeddings" or
        "draws".
        """
        name = subject
        if self.update:
            name += f" of update {self.update}"
        if self.training:
            name += " in training"
        return name


def modes_of(task: CheckedTask, updates: Mapping[str, CheckedTask]) -> list[Mode]:
    """Return the task in evaluation, the updates' tasks in evaluation mode, and the training tasks in training mode.

    Args:
        task: of evaluations and, without updates, of training.
        updates: the task of each update, by name.
    """
    modes = [Mode(task, EVALUATION, training=False)]
    for name, update_task in updates.items():
        modes.append(Mode(update_task, training_draws(name), training=False, update=name))
    training_tasks = updates or {"": task}
    for name, training_task in training_tasks.items():
        modes.append(Mode(training_task, training_draws(name), training=True, update=name))
    return modes


def has_all_values(model: nn.Module) -> bool:
    """Return whether the model can be called: with `parallel.fsdp.meta_init`, parameters have no values yet."""
    return all(map(has_values, model.parameters()))


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
    continues: bool = False  # whether it is this run's own: what the run has begun is refused no more
