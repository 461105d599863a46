"""Which dimension of what a forward draws holds the samples (`train.draws=per_sample`), learnt before the first step.

Shapes tell most of it: a task is called with four samples and with two of them, and the dimension that is twice as long
is theirs. Where a sample has several rows they may be neighbours, as in the weights of attention, or one batch apart,
as in `cat([view, view])`: the loss of the four and those of their halves agree only if rows are read as they are meant.
"""

import contextlib
import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.assembly.parts import Parts
from trainapp.assembly.trials import Samples, Trials
from trainapp.config.schema import Config
from trainapp.data.batch import tensors_in
from trainapp.losses import contrastive
from trainapp.losses.losses import CheckedTask, Metrics, compares_samples, has_embeddings, is_built_in
from trainapp.memory.device import uncompiled
from trainapp.parallel.ranks import Ranks
from trainapp.rng import Drawing, Drawn, Ledger, places_of
from trainapp.snapshot import Snapshot
from trainapp.stateful import Stateful
from trainapp.torch_private import has_values
from trainapp.training.engine import training_draws
from trainapp.training.evaluate import EVALUATION

CLEAR, CLOSE = 1e-6, 1e-3  # of the loss: other random numbers change it more, rounding less
log = logging.getLogger(__name__)


def learnt(config: Config, parts: Parts, model: nn.Module, ranks: Ranks) -> Ledger:
    """The ledger of the first rank. Collective. Call before the model is compiled or sharded. Restores everything that
    a Snapshot covers. Raises errors of reading a stream; what fails here is not learnt: the first step reports it.
    """
    ledger, task = Ledger(), parts.components.task
    updates = parts.components.updates or {"": task}
    works = [(training_draws(name), own, True) for name, own in updates.items()] + [(EVALUATION, task, False)]
    if all(map(has_values, model.parameters())):  # with parallel.fsdp.meta_init there are no values yet
        for work, own, training in works:
            # The first dimension, which is assumed: draws of trainapp's models and losses.
            is_known = is_built_in(own) and type(model).__module__.startswith("trainapp.models.")
            if not is_known and (has_embeddings(own) or not compares_samples(own)):
                _learn_of(own, config, parts, model, ledger, work, training)
    (first, *_) = ranks.all_gather_object(ledger)
    return first


def _learn_of(task: CheckedTask, config: Config, parts: Parts, model: nn.Module, *into: Any) -> None:
    """By a task in fp32, or as it is trained."""
    samples = parts.first_samples(config.train.seed)
    if samples is None or not samples.same:
        return
    compute = functools.partial(_of_embeddings, task, model) if has_embeddings(task) else None
    for around in (contextlib.nullcontext, lambda: parts.numerics.autocast):
        try:
            snapshot = Snapshot.of(Stateful(model=model, task=task.unchecked))
            options: dict[str, Any] = {"compute": compute, "snapshot": snapshot, "around": around}
            trial = Trials(task, model, samples, parts.device, config.train.seed, **options)
            snapshot.take("all")  # in training mode, a teacher's frozen parameters may be written
            with uncompiled():
                _learn(trial, samples, *into)
            return
        except Exception as error:  # the first step raises it again, with its traceback
            log.debug("train.draws: nothing is learnt of %s: %s", task.setting, error)


def _of_embeddings(task: Any, model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """A sum over samples, of embeddings alone."""
    embeddings = tensors_in(contrastive.embed(task, model, batch))
    return torch.stack([one.double().square().sum() for one in embeddings]).sum(), 1, {}


def _learn(trial: Trials, samples: Samples, ledger: Ledger, work: str, training: bool) -> None:
    """Add what `work` draws to the ledger."""
    half = samples.number // 2
    positions = {"ab": range(samples.number), "a": range(half), "b": range(half, samples.number)}

    def loss(batch: str, known: Ledger, drawn: dict[int, Drawn] | None = None) -> float:
        return trial(batch, training, Drawing((0,), positions[batch], known, work, drawn)).loss

    whole, part = dict[int, Drawn](), dict[int, Drawn]()
    loss("ab", Ledger(), whole)
    loss("a", Ledger(), part)
    ledger.places[work] = places = places_of(whole, part, samples.number, half)
    if len(whole) != len(part):
        ledger.depends["number of draws"] = (
            f"the forward draws {len(whole)} times for {samples.number} samples and {len(part)} times for {half}: what "
            "it draws after that depends on the batch"
        )
    candidates = [places] if any(own.axis is not None for own in places.values()) else []
    if any(own.rows > 1 for own in places.values()):
        candidates.append({number: own._replace(apart=own.rows > 1) for number, own in places.items()})
    smallest = math.inf
    for candidate in candidates:
        together, first, second = (loss(batch, Ledger({work: candidate})) for batch in positions)
        deviation = abs(together - first - second) / ((abs(together) + abs(first) + abs(second)) / 2 or 1.0)
        if deviation < smallest:
            smallest, ledger.places[work] = deviation, candidate
        if deviation < CLEAR:
            break
    if candidates and smallest > CLOSE:
        ledger.depends[f"draws of {work}"] = (
            f"the loss of {samples.number} samples is not that of their halves, by {smallest:.1%}, though each sample "
            "draws the same: draws cannot be told apart by sample, or the loss compares samples"
        )
