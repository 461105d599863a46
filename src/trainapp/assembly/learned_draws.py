"""Finds the dimension of the samples in each random tensor that a forward draws, before the first step.

Shapes tell most of it: a task is called with four samples and with two of them, and the dimension that is twice as long
is theirs. Where a sample has several rows they may be neighbours, as in the weights of attention, or one batch apart,
as in `cat([view, view])`: the loss of the four is that of their halves only if rows are read as they are meant. This is
seen best in fp64, with noise on the parameters. What was found, and what could not be tried and why, is in
`Resources.checks`.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from trainapp.assembly.checks import NO_CHECK_NEEDED, Mode, is_known, modes_of, without_values
from trainapp.assembly.comparison import excess, size_of
from trainapp.assembly.resources import Resources
from trainapp.assembly.trials import TaskProbe, first_that_works, precisions_to_try
from trainapp.config.schema import Config
from trainapp.data.batch import tensors_in
from trainapp.draws import belong_to_samples
from trainapp.errors import summary_of
from trainapp.losses import contrastive
from trainapp.losses.losses import Metrics, has_embeddings, needs_whole_batch
from trainapp.parallel.ranks import Ranks
from trainapp.rng import DrawLayout, DrawRecord, RandomDraw, SampleDraws, places_of, topic_of
from trainapp.units import listed

# A deviation of the loss above it shows that rows are read wrong, in fp64 and otherwise.
CLOSE, CLOSE_IN_FP32 = 1e-5, 1e-3
NOISE = 0.3
BY_DEFAULT = "the first dimension as long as the batch counts as theirs"  # of draws that are not known
Places = dict[int, DrawLayout]


def learnt(config: Config, resources: Resources, model: nn.Module, ranks: Ranks) -> DrawRecord:
    """Return the first rank's record of draws. Collective. Call before the model is compiled or sharded. Restores all
    that a Snapshot covers. Raises errors of reading a stream.
    """
    draw_record = DrawRecord()
    tried = []
    for mode in modes_of(resources):
        if mode.is_trained and not mode.training:  # an update's task is not evaluated
            continue
        if reason := _reason_to_skip(config, resources, model, mode):
            resources.note_check(mode.check("draws"), reason)
        else:
            tried.append(mode)
    samples = resources.first_samples(config.train.seed) if tried else None
    for mode in tried:
        if samples is None:
            text = f"not tried: {resources.samples_error}"
        elif not samples.same:
            text = f"not tried: a batch is not its halves joined; {BY_DEFAULT}"
        else:
            text = _learn(config, resources, model, mode, draw_record)
        resources.note_check(mode.check("draws"), text)
    (first, *_) = ranks.all_gather_object(draw_record)
    return first


def _reason_to_skip(config: Config, resources: Resources, model: nn.Module, mode: Mode) -> str:
    """Why nothing is learnt of a mode, the same on all ranks; "" if it is."""
    if not belong_to_samples(config.train.draws, resources.device):
        return f"torch's own, of the micro-batch: train.draws={config.train.draws} on {resources.device.type}"
    if resources.resumes:
        return "those of the resumed checkpoint"
    if is_known(mode, model):
        return NO_CHECK_NEEDED
    if needs_whole_batch(mode.task):
        return "of the whole batch: the task declares whole_batch, it is never cut"
    reason = without_values(model)
    return f"not tried: {reason}; {BY_DEFAULT}" if reason else ""


def _learn(config: Config, resources: Resources, model: nn.Module, mode: Mode, draw_record: DrawRecord) -> str:
    """Add a mode's draws to the record. Return what was found, in words."""
    compute = _of_embeddings if has_embeddings(mode.task) else None
    ways = functools.partial(precisions_to_try, mode.task, config, resources, model, compute=compute)
    try:
        shapes = functools.partial(_shapes, mode=mode, draw_record=draw_record)
        candidates, others = first_that_works(ways(noise=None), shapes, mode.is_trained).result
    except Exception as error:  # the first step raises it again, with its traceback
        return f"not known: {summary_of(error)}; {BY_DEFAULT}"
    text = _in_words(draw_record, mode, others)
    try:
        if candidates:
            choose = functools.partial(_choose, mode=mode, draw_record=draw_record, candidates=candidates)
            first_that_works(ways(noise=NOISE), choose, mode.is_trained)
    except Exception as error:
        text += f", by their shapes alone: {summary_of(error)}"
    if _topic(mode) in draw_record.depends:
        text += ", but the loss does not add up: perhaps not each to its own"
    return text


def _in_words(draw_record: DrawRecord, mode: Mode, others: list[str]) -> str:
    """Whose draws are whose. others: what else is drawn, in words."""
    places = draw_record.places[mode.work].values()
    texts = []
    if shared := sorted({_kernel(place) for place in places if place.axis is None and not place.varies}):
        texts.append(f"shared by all samples: {listed(shared)}")
    if varying := sorted({_kernel(place) for place in places if place.varies}):
        texts.append(f"of the micro-batch: {listed(varying)}")
    texts.extend(others)
    if any(place.axis is not None for place in places):
        texts.append("the others belong to samples" if texts else "all belong to samples")
    return "; ".join(texts) or "none"


def _kernel(place: DrawLayout) -> str:
    return place.kernel.partition(".")[0]


def _topic(mode: Mode) -> str:
    """Return the topic under which draws that cannot be assigned are noted."""
    return f"draws of {mode.work}"


def _of_embeddings(task: Any, model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """A weighted sum of the embeddings in place of the loss: the sum of squares of normalised ones is constant."""
    total = torch.zeros((), dtype=torch.float64)
    for one in tensors_in(contrastive.embed(task, model, batch)):
        weights = torch.arange(one[0].numel(), dtype=torch.float64, device=one.device).cos()
        total = total.to(one.device) + (one.double().flatten(1) * weights).sum()
    return total, 1, {}


def _shapes(trial: TaskProbe, mode: Mode, draw_record: DrawRecord) -> tuple[list[Places], list[str]]:
    """Add what is drawn to the record. Return the ways to read it, and what else is drawn, in words."""
    logs = {"ab": dict[int, RandomDraw](), "a": dict[int, RandomDraw]()}
    positions = {batch: trial.samples.positions(batch) for batch in logs}
    noted = DrawRecord()
    others: list[str] = []
    for batch, drawn in logs.items():
        sums = trial(batch, mode.training, SampleDraws((0,), positions[batch], noted, mode.work, drawn))
        if sums.drawn and not others:
            others.append("Python's or NumPy's of the micro-batch")
    # A generator of its own, fused kernels; whose the other draws are is not known to this record.
    others += [text for topic, text in noted.depends.items() if not topic.startswith(topic_of(""))]
    (whole, part), (number, of_part) = logs.values(), map(len, positions.values())
    draw_record.places[mode.work] = places = places_of(whole, part, number, of_part)
    if len(whole) != len(part):
        draw_record.depends["number of draws"] = (
            f"the forward draws {len(whole)} times for {number} samples and {len(part)} times for {of_part}: later "
            "draws depend on the micro-batch"
        )
        others.append("their number depends on the micro-batch")
    if all(own.axis is None for own in places.values()):
        return [], others
    turned = {draw: own._replace(interleaved=own.rows > 1) for draw, own in places.items()}
    return [places] if turned == places else [places, turned], others


def _choose(trial: TaskProbe, mode: Mode, draw_record: DrawRecord, candidates: list[Places]) -> None:
    """Keep the one with which the loss of all samples is that of their halves."""
    deviations = []
    for candidate in candidates:
        values = {}
        for name in ("ab", "a", "b"):
            drawing = SampleDraws((0,), trial.samples.positions(name), DrawRecord({mode.work: candidate}), mode.work)
            values[name] = trial(name, mode.training, drawing).loss
        deviations.append(abs(excess(values)) / (size_of(values) or 1.0))
    smallest = min(deviations)
    if not math.isfinite(smallest):
        raise ArithmeticError("the loss is not finite")
    draw_record.places[mode.work] = candidates[deviations.index(smallest)]
    if smallest > (CLOSE if trial.dtype is torch.float64 else CLOSE_IN_FP32):
        draw_record.depends[_topic(mode)] = (
            f"the loss of {trial.samples.number} samples is not that of their halves, by {smallest:.1%}, though each "
            "sample draws the same: draws cannot be assigned to samples, or the loss compares samples"
        )
