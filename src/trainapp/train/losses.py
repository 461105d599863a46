"""The losses that come with the application: `task(model, batch) -> (loss_sum, count, metrics)`.

loss_sum is a sum over samples or tokens (a scalar tensor) and count how many there were, or the sum of their weights (a
number, or a scalar tensor where padding decides). The loop divides by the true count of the whole optimizer step, so that uneven micro-batches
and padding weigh as they should. metrics maps a name to a sum over the same count (a scalar tensor), or to a function
that computes it: functions are only called for steps that are logged, and in evaluation. A metric that only some
micro-batches have is averaged over the count of those.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Metrics = Mapping[str, Tensor | Callable[[], Tensor]]
Task = Callable[[nn.Module, Any], tuple[Tensor, Tensor | float, Metrics]]

IGNORED = -100  # the target of padding


def inputs_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """From a mapping with keys "inputs" and "targets", an object with those attributes, or a pair."""
    if isinstance(batch, (dict, Mapping)):  # dict first: isinstance with an ABC takes 10 times as long
        return batch["inputs"], batch["targets"]
    if hasattr(batch, "inputs") and hasattr(batch, "targets"):  # a dataclass; a namedtuple, in whatever order
        return batch.inputs, batch.targets
    inputs, targets = batch
    return inputs, targets


def classification(model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """Cross-entropy of logits [B, classes] against int64 targets [B]; the metric is accuracy."""
    inputs, targets = inputs_and_targets(batch)
    logits = model(inputs)
    loss_sum = F.cross_entropy(logits.float(), targets, reduction="sum")
    detached = logits.detach()
    return loss_sum, len(targets), {"accuracy": lambda: (detached.argmax(-1) == targets).sum()}


def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Metrics]:
    """Cross-entropy of logits [B, T, vocabulary] against int64 targets [B, T], -100 for padding."""
    inputs, targets = inputs_and_targets(batch)
    logits = model(inputs)
    loss_sum = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    detached = logits.detach()
    return loss_sum, (targets != IGNORED).sum(), {"accuracy": lambda: (detached.argmax(-1) == targets).sum()}


def evaluate_metrics(metrics: Metrics) -> dict[str, Tensor]:
    """The metrics' sums; metrics given as functions are called."""
    with torch.no_grad():
        return {name: value() if callable(value) else value.detach() for name, value in metrics.items()}
