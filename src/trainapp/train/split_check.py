"""Part of `train.check_exactness`: whether a `split` of the user's returns the samples that it is asked for."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainapp.data.step_batches import Halves
from trainapp.errors import TrainingStopped
from trainapp.rng import preserved_rng
from trainapp.train.run import Run

TOLERANCE = {"fp32": 1e-3}  # relative: other padding changes rounding, another sample changes more
COARSE = 2e-2  # where weights or matmuls have fewer bits


class Sums(NamedTuple):
    """What the task returns for a batch."""

    loss: float
    divisor: float  # the task's count

    def __str__(self) -> str:
        return f"loss_sum {self.loss:.6g} and count {self.divisor:g}"


def require_right_split(run: Run, undo: Callable[[], None]) -> None:
    """Compare the task's results for the halves of a first batch. Collective. Raises TrainingStopped for a wrong one.

    Right is a split that gives what the same samples give when they are collated again, or that adds up to the whole
    batch: samples may depend on the batch that they were fetched in, and a loss on all samples of its batch. Tensors
    are not compared, since a split may leave more padding. undo: returns to the start of the step.
    """
    try:
        halves = run.batches.halves(run.state.progress, run.sizes.train.size, run.sizes.parts)
        verdict = None if halves is None else _verdict(run, halves)
    finally:
        run.state.model.train()
    if halves is None:  # on all ranks
        return
    undo()
    by_rank = [text for text in run.ranks.all_gather_object(verdict) if text]
    if by_rank:
        raise TrainingStopped(by_rank[0])


def _verdict(run: Run, halves: Halves) -> str | None:
    """The message, or None. Always five forwards: under FSDP every rank must take part in each."""
    run.state.model.eval()
    whole = _sums(run, halves.batch)
    split = [_sums(run, part) for part in halves.split]
    collated = [_sums(run, part) for part in halves.collated]
    if halves.samples < 2:
        return None
    together = Sums(sum(part.loss for part in split), sum(part.divisor for part in split))
    tolerance = TOLERANCE.get(run.config.precision.mode, COARSE)
    pairs = list(zip(halves.ranges, split, collated, strict=True))
    wrong = [pair for pair in pairs if not _are_close(pair[1], pair[2], tolerance)]
    if not wrong or _are_close(together, whole, tolerance):
        return None
    (start, end), given, expected = wrong[0]
    return (
        f"train.check_exactness=true: `split` does not cut a batch of {halves.samples} samples: for its samples "
        f"[{start}, {end}) the task returns {given} after split(batch, {start}, {end}), and {expected} when the same "
        f"samples are collated again; nor do both halves add up to the whole batch ({together}, instead of {whole}). "
        "A retried step would train on other samples; correct `split`, or leave it out"
    )


def _sums(run: Run, batch: Any) -> Sums:
    with torch.no_grad(), preserved_rng(run.state.device):
        loss, count, _ = run.strategy.evaluate(run.task, batch)
        return Sums(float(loss), float(count))


def _are_close(a: Sums, b: Sums, tolerance: float) -> bool:
    return all(
        math.isclose(x, y, rel_tol=tolerance, abs_tol=1e-12) or (math.isnan(x) and math.isnan(y))
        for x, y in zip(a, b, strict=True)
    )
