"""The names of a task's metrics, before anything is trained."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trainapp.data.batch import map_tensors
from trainapp.hooks.metrics import EVERY
from trainapp.rng import preserved_rng
from trainapp.train.modes import evaluation_mode
from trainapp.train.run import Run


def metric_names(run: Run, samples: int = 2) -> set[str]:
    """`loss` and the metrics that the task has for the first samples of the training data, on any rank.

    One forward in evaluation mode, uncompiled, without gradients, that leaves no trace: generators, buffers, states and
    attributes of model and task are restored. Collective.
    """
    state = run.state
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(preserved_rng(state.device))
        run.restore_point.take(unproven=True)
        stack.callback(run.restore_point.restore)
        modules = (state.model, *state.stateful.modules.values())
        task = getattr(run.task, "unchecked", run.task)
        stack.enter_context(_attributes_restored([*(m for top in modules for m in top.modules()), task]))
        stack.enter_context(evaluation_mode(modules))
        if run.config.train.compile:  # two samples are no shape to compile for
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        batch = map_tensors(lambda tensor: tensor.to(state.device), run.batches.example(samples))
        run.ranks.enable_votes(False)
        with state.precision.autocast:
            _, _, metrics = run.strategy.evaluate(run.task, batch)
        if run.strategy.forward_is_collective:
            run.strategy.finish_accumulation()
        own = {"loss", *metrics} - {EVERY}
    return set().union(*run.ranks.all_gather_object(own))


@contextlib.contextmanager
def _attributes_restored(owners: Iterable[Any]) -> Iterator[None]:
    """Restore which values the attributes of these objects have; not what is changed inside the values."""
    before = [(owner, dict(vars(owner))) for owner in owners if hasattr(owner, "__dict__")]
    try:
        yield
    finally:
        for owner, attributes in before:
            vars(owner).clear()
            vars(owner).update(attributes)
