"""Metrics on top of torchmetrics that keep something in plain attributes."""

import torch
import torchmetrics
from torch import nn


class Counting(torchmetrics.Metric):
    """A state for the sum; a number, and a list in a dict, for the rest."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self._begin()

    def _begin(self):
        self.count, self.seen = 0, {"sizes": []}

    def update(self, outputs, targets):
        self.sum += (outputs - targets).abs().sum()
        self.count += len(outputs)
        self.seen["sizes"].append(len(outputs))

    def compute(self):
        return {"mean": self.sum / self.count, "count": self.count, "batches": len(self.seen["sizes"])}

    def reset(self):
        super().reset()
        self._begin()


class Buffered(torchmetrics.MeanAbsoluteError):
    """The numbers in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("batches", torch.zeros(()))

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.count += len(outputs)
        self.batches += 1

    def compute(self):
        return {"mean": super().compute(), "count": self.count, "batches": self.batches}

    def reset(self):
        super().reset()
        self.count.zero_()
        self.batches.zero_()


class Holding(nn.Module):
    """A metric inside, and a number beside it."""

    def __init__(self):
        super().__init__()
        self.inner, self.count, self.batches = torchmetrics.MeanAbsoluteError(), 0, 0
        self.parts = [self.inner]  # the same object

    def update(self, outputs, targets):
        self.parts[0].update(outputs, targets)
        self.count += len(outputs)
        self.batches += 1

    def compute(self):
        return {"mean": self.inner.compute(), "count": self.count, "batches": self.batches}

    def reset(self):
        self.inner.reset()
        self.count = self.batches = 0


class Recognising(torchmetrics.MeanAbsoluteError):
    """Remembers the kind of its outputs, and computes nothing without it."""

    mode = None

    def update(self, outputs, targets):
        self.mode = "integers" if not outputs.is_floating_point() else "numbers"
        super().update(outputs, targets)

    def compute(self):
        assert self.mode is not None
        return super().compute()
