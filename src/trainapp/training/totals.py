"""Totals of loss, count and metrics over micro-batches and ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trainapp.errors import UserError
from trainapp.losses.losses import problem_of_count
from trainapp.parallel.ranks import Ranks, SingleRank

Number = Tensor | float


class Metric(NamedTuple):
    """The sum of a metric, and of the counts of the micro-batches that have it."""

    total: Number
    denominator: Number


@dataclass
class Totals:
    """Sums of losses, of what they are averaged over, and of metrics. They stay on the device until `means`.

    A count is a number of samples or tokens, or a sum of their weights, however small.
    """

    loss: Number = 0.0
    count: Number = 0
    metrics: dict[str, Metric] = field(default_factory=dict)  # this rank's; `means` adds those of the others
    samples: int = 0

    def plus(
        self, loss: Tensor, count: Number, metrics: Mapping[str, Number], samples: int = 0, real: bool = True
    ) -> "Totals":
        """These and a micro-batch's; a dummy (`real=False`) adds nothing. Raises UserError for a count that is not a
        number.
        """
        if not real:
            return self
        new_loss = _summand(loss)
        if isinstance(self.loss, Tensor):  # not for the first: saves an operation per step
            new_loss = self.loss + new_loss
        if type(count) is int:  # the usual case, without calls
            new_count = self.count + count
        else:
            count = _summand(count)
            new_count = _sum_of_counts(self.count, count)
        added = {}
        for name, value in metrics.items():
            total, denominator = self.metrics.get(name, (0, 0))
            # Where all micro-batches so far have the metric, it is the loss's count: that saves an operation each.
            denominator = new_count if denominator is self.count else denominator + count
            added[name] = Metric(total + _summand(value), denominator)
        return Totals(new_loss, new_count, self.metrics | added, self.samples + samples)

    def over(self, ranks: Ranks) -> "Totals":
        """Loss and count summed over all ranks. One collective, whatever metrics each rank has."""
        if ranks.world == 1:
            return self
        loss, count = ranks.all_reduce_sum(torch.stack([_on(ranks.device, v) for v in (self.loss, self.count)]))
        return Totals(loss, count, self.metrics, self.samples)

    def means(self, ranks: Ranks | None = None) -> dict[str, float]:
        """`{"loss": ..., metric: ...}`; a metric is averaged over the micro-batches and ranks that have it. NaN where
        the count is 0. Waits for the device.

        ranks: collective, the metrics of all of them; None: this rank's alone. Raises UserError for a negative count.
        """
        own = {name: (float(total), float(count)) for name, (total, count) in self.metrics.items()}
        sums: dict[str, tuple[float, float]] = {}
        for metrics in (ranks or SingleRank()).all_gather_object(own):
            for name, (total, count) in metrics.items():
                others_total, others_count = sums.get(name, (0.0, 0.0))
                sums[name] = (others_total + total, others_count + count)
        means = {"loss": _mean("loss", float(self.loss), float(self.count))}
        return means | {name: _mean(name, *sums_of) for name, sums_of in sums.items()}


def _on(device: torch.device, value: Number) -> Tensor:
    """fp64 on `device`. A number becomes a fill: `as_tensor` would copy it from the host and wait for the device."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _sum_of_counts(total: Number, count: Number) -> Number:
    try:
        total = total + count
        fits = not isinstance(total, Tensor) or total.ndim == 0
    except TypeError:
        fits = False
    if not fits:
        raise UserError(f"task: {problem_of_count(count)}")
    return total


def _summand(value: Number) -> Number:
    """Without its graph, and in fp32 at least: bf16 counts no further than 256."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach() if value.requires_grad else value
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _mean(name: str, total: float, count: float) -> float:
    if count < 0:
        raise UserError(
            f"task: the count that {name} is divided by is negative ({count:g}); return the number of samples or "
            "tokens, or the sum of their weights"
        )
    return total / count if count else math.nan
