"""The names of a task's metrics, before anything is trained."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from trainapp.data.batch import map_tensors
from trainapp.hooks.metrics import EVERY
from trainapp.rng import preserved_rng
from trainapp.train.attributes import Attributes
from trainapp.train.modes import evaluation_mode, uncompiled
from trainapp.train.run import Run
from trainapp.train.side_effects import KeepsWritten
from trainapp.train.task_attributes import unchecked


def metric_names(run: Run, samples: int = 2) -> set[str]:
    """`loss` and the metrics that the task has for the first samples of the training data, on any rank. Collective.

    See `without_trace`.
    """
    with without_trace(run):
        own = {"loss", *metrics_of(run, run.batches.example(samples))} - {EVERY}
    return set().union(*run.ranks.all_gather_object(own))


@contextlib.contextmanager
def without_trace(run: Run) -> Iterator[None]:
    """For a forward in evaluation mode, uncompiled, without gradients, that leaves no trace in model and task:
    generators, tensors and states are restored, and what attributes hold, see `Attributes`.
    """
    state = run.state
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(preserved_rng(state.device))
        run.restore_point.take(unproven=True)
        stack.callback(run.restore_point.restore)
        modules = (state.model, *state.stateful.modules.values())
        task = unchecked(run.task)
        attributes = Attributes(*modules, task)
        stack.callback(attributes.restore)
        written = KeepsWritten(attributes.tensors)  # the others are the restore point's
        stack.callback(written.restore)
        stack.enter_context(written)
        stack.enter_context(evaluation_mode(modules))
        stack.enter_context(uncompiled())
        yield


def metrics_of(run: Run, batch: Any) -> Any:
    """What the task returns as metrics for a batch. Collective with FSDP."""
    batch = map_tensors(lambda tensor: tensor.to(run.state.device), batch)
    run.ranks.enable_votes(False)
    with run.state.precision.autocast:
        _, _, metrics = run.strategy.evaluate(run.task, batch)
    if run.strategy.forward_is_collective:
        run.strategy.finish_accumulation()
    return metrics
