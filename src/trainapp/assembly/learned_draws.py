"""Finds the dimension of the samples in each random tensor that a forward draws, before the first step.

Shapes tell most of it: a task is called with four samples and with two of them, and the dimension that is twice as long
is theirs. Where a sample has several rows they may be neighbours, as in the weights of attention, or one batch apart,
as in `cat([view, view])`: the loss of the four is that of their halves only if rows are read as they are meant. This is
seen best in fp64, with noise on the parameters.
"""

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.assembly.checks import Mode, excess, modes_of, size_of
from trainapp.assembly.parts import Parts
from trainapp.assembly.trials import Trials, first_that_works, ways_of
from trainapp.config.schema import Config
from trainapp.data.batch import tensors_in
from trainapp.losses import contrastive
from trainapp.losses.losses import Metrics, has_embeddings, needs_whole_batch
from trainapp.parallel.ranks import Ranks
from trainapp.rng import Drawing, Drawn, Ledger, Place, places_of
from trainapp.torch_private import has_values
from trainapp.training.evaluate import EVALUATION

# A deviation of the loss above it shows that rows are read wrong, in fp64 and otherwise.
CLOSE, CLOSE_IN_FP32 = 1e-5, 1e-3
NOISE = 0.3
Places = dict[int, Place]
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
        for mode in modes if samples is not None and samples.same else ():
            compute = _of_embeddings if has_embeddings(mode.task) else None
            ways = functools.partial(ways_of, mode.task, config, parts, model, compute=compute)
            try:
                shapes = functools.partial(_shapes, mode=mode, ledger=ledger)
                candidates = first_that_works(ways(noise=None), shapes) or []
                choose = functools.partial(_choose, mode=mode, ledger=ledger, candidates=candidates)
                first_that_works(ways(noise=NOISE) if candidates else [], choose)
            except Exception as error:  # the first step raises it again, with its traceback
                log.debug("train.draws: nothing is learnt of %s: %s", mode.task.setting, error)
    (first, *_) = ranks.all_gather_object(ledger)
    return first


def _of_embeddings(task: Any, model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """A weighted sum of the embeddings in place of the loss: the sum of squares of normalised ones is constant."""
    total = torch.zeros((), dtype=torch.float64)
    for one in tensors_in(contrastive.embed(task, model, batch)):
        weights = torch.arange(one[0].numel(), dtype=torch.float64, device=one.device).cos()
        total = total.to(one.device) + (one.double().flatten(1) * weights).sum()
    return total, 1, {}


def _shapes(trial: Trials, mode: Mode, ledger: Ledger) -> list[Places]:
    """Add what is drawn to the ledger. Returns the ways to read it."""
    logs = {"ab": dict[int, Drawn](), "a": dict[int, Drawn]()}
    positions = {batch: trial.samples.positions(batch) for batch in logs}
    for batch, drawn in logs.items():
        trial(batch, mode.training, Drawing((0,), positions[batch], Ledger(), mode.work, drawn))
    (whole, part), (number, of_part) = logs.values(), map(len, positions.values())
    ledger.places[mode.work] = places = places_of(whole, part, number, of_part)
    if len(whole) != len(part):
        ledger.depends["number of draws"] = (
            f"the forward draws {len(whole)} times for {number} samples and {len(part)} times for {of_part}: later "
            "draws depend on the micro-batch"
        )
    if all(own.axis is None for own in places.values()):
        return []
    others = {draw: own._replace(apart=own.rows > 1) for draw, own in places.items()}
    return [places] if others == places else [places, others]


def _choose(trial: Trials, mode: Mode, ledger: Ledger, candidates: list[Places]) -> None:
    """Keep the one with which the loss of all samples is that of their halves."""
    deviations = []
    for candidate in candidates:
        values = {}
        for name in ("ab", "a", "b"):
            drawing = Drawing((0,), trial.samples.positions(name), Ledger({mode.work: candidate}), mode.work)
            values[name] = trial(name, mode.training, drawing).loss
        deviations.append(abs(excess(values)) / (size_of(values) or 1.0))
    smallest = min(deviations)
    if not math.isfinite(smallest):
        raise ArithmeticError("the loss is not finite")
    ledger.places[mode.work] = candidates[deviations.index(smallest)]
    if smallest > (CLOSE if trial.dtype is torch.float64 else CLOSE_IN_FP32):
        ledger.depends[f"draws of {mode.work}"] = (
            f"the loss of {trial.samples.number} samples is not that of their halves, by {smallest:.1%}, though each "
            "sample draws the same: draws cannot be assigned to samples, or the loss compares samples"
        )
