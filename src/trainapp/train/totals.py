"""Totals of loss, count and metrics over micro-batches and ranks."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainapp.parallel.ranks import Ranks


@dataclass
class Totals:
    """Sums of losses, of what they are averaged over, and of metrics. They stay on the device until `means`."""

    loss: Tensor | float = 0.0
    count: Tensor | int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    samples: int = 0

    def add(
        self, loss: Tensor, count: Tensor | int, metrics: dict[str, Tensor], samples: int = 0, real: bool = True
    ) -> None:
        """Add a micro-batch; a dummy (`real=False`) adds only its metrics' names."""
        if not real:
            loss, count, samples = torch.zeros_like(loss), 0, 0
            metrics = {name: torch.zeros_like(value) for name, value in metrics.items()}
        # All together or, when memory runs out in one of the sums, not at all.
        added = {name: self.metrics.get(name, 0) + value for name, value in metrics.items()}
        if isinstance(self.loss, Tensor):  # not for the first: saves an operation per step
            loss = self.loss + loss
        count = self.count + count
        self.loss, self.count, self.samples = loss, count, self.samples + samples
        self.metrics.update(added)

    def over(self, ranks: Ranks) -> "Totals":
        """The totals over all ranks."""
        if ranks.world == 1:
            return self
        names = sorted(self.metrics)
        values = [self.loss, self.count, *(self.metrics[name] for name in names)]
        numbers = [torch.as_tensor(value, dtype=torch.float64, device=ranks.device) for value in values]
        loss, count, *metrics = ranks.all_reduce_sum(torch.stack(numbers))
        return Totals(loss, count, dict(zip(names, metrics, strict=True)), self.samples)

    def means(self) -> dict[str, float]:
        """`{"loss": ..., metric: ...}`. Waits for the device."""
        count = max(1, int(self.count))
        return {name: float(value) / count for name, value in {"loss": self.loss, **self.metrics}.items()}
