"""Finds the dimension of the samples in each random tensor that a forward draws, before the first step.

Shapes tell most of it: a task is called with four samples and with two of them, and the dimension that is twice as long
is theirs. Where a sample has several rows they may be neighbours, as in the weights of attention, or one batch apart,
as in `cat([view, view])`: the loss of the four and those of their halves agree only if rows are read as they are meant.
"""

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.assembly.checks import modes_of
from trainapp.assembly.parts import Parts
from trainapp.assembly.trials import Trials, first_that_works, ways_of
from trainapp.config.schema import Config
from trainapp.data.batch import tensors_in
from trainapp.losses import contrastive
from trainapp.losses.losses import Metrics, has_embeddings, needs_whole_batch
from trainapp.parallel.ranks import Ranks
from trainapp.rng import Drawing, Drawn, Ledger, places_of
from trainapp.torch_private import has_values
from trainapp.training.evaluate import EVALUATION

# Of the loss: a deviation below CLEAR shows that rows are read right, one above CLOSE that they are read wrong.
CLEAR, CLOSE = 1e-6, 1e-3
log = logging.getLogger(__name__)


def learnt(config: Config, parts: Parts, model: nn.Module, ranks: Ranks) -> Ledger:
    """The ledger of the first rank. Collective. Call before the model is compiled or sharded. Restores everything that
    a Snapshot covers. Raises errors of reading a stream.
    """
    ledger = Ledger()
    modes = [mode for mode in modes_of(parts, model) if mode.training or mode.work == EVALUATION]
    modes = [mode for mode in modes if not needs_whole_batch(mode.task)]
    if modes and all(map(has_values, model.parameters())):  # with parallel.fsdp.meta_init there are no values yet
        samples = parts.first_samples(config.train.seed)
        for task, work, training in modes if samples is not None and samples.same else ():
            options = {"compute": functools.partial(_of_embeddings, task, model)} if has_embeddings(task) else {}
            learn = functools.partial(_learn, ledger=ledger, work=work, training=training)
            try:
                first_that_works(ways_of(task, config, parts, model, doubles=False, **options), learn)
            except Exception as error:  # the first step raises it again, with its traceback
                log.debug("train.draws: nothing is learnt of %s: %s", task.setting, error)
    (first, *_) = ranks.all_gather_object(ledger)
    return first


def _of_embeddings(task: Any, model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """The sum of squared embeddings, in place of the loss."""
    embeddings = tensors_in(contrastive.embed(task, model, batch))
    return torch.stack([one.double().square().sum() for one in embeddings]).sum(), 1, {}


def _learn(trial: Trials, ledger: Ledger, work: str, training: bool) -> None:
    """Add what `work` draws to the ledger."""
    number, half = trial.samples.number, trial.samples.number // 2
    positions = {"ab": range(number), "a": range(half), "b": range(half, number)}

    def loss(batch: str, known: Ledger, drawn: dict[int, Drawn] | None = None) -> float:
        return trial(batch, training, Drawing((0,), positions[batch], known, work, drawn)).loss

    whole, part = dict[int, Drawn](), dict[int, Drawn]()
    loss("ab", Ledger(), whole)
    loss("a", Ledger(), part)
    ledger.places[work] = places = places_of(whole, part, number, half)
    if len(whole) != len(part):
        ledger.depends["number of draws"] = (
            f"the forward draws {len(whole)} times for {number} samples and {len(part)} times for {half}: later draws "
            "depend on the micro-batch"
        )
    candidates = [places] if any(own.axis is not None for own in places.values()) else []
    if any(own.rows > 1 for own in places.values()):
        candidates.append({draw: own._replace(apart=own.rows > 1) for draw, own in places.items()})
    smallest = math.inf
    for candidate in candidates:
        together, first, second = (loss(batch, Ledger({work: candidate})) for batch in ("ab", "a", "b"))
        deviation = abs(together - first - second) / ((abs(together) + abs(first) + abs(second)) / 2 or 1.0)
        if deviation < smallest:
            smallest, ledger.places[work] = deviation, candidate
        if deviation < CLEAR:
            break
    if CLOSE < smallest < math.inf:
        ledger.depends[f"draws of {work}"] = (
            f"the loss of {number} samples is not that of their halves, by {smallest:.1%}, though each sample "
            "draws the same: draws cannot be assigned to samples, or the loss compares samples"
        )
