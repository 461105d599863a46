"""Tasks as users write them, named in a configuration by `user_packages=[own_tasks]`."""

from typing import Any

import torch
from torch import Tensor, nn

from trainapp.train.losses import classification


def nan_in_evaluation(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Classification; in evaluation the metric divides zero by zero."""
    loss, count, _ = classification(model, batch)
    return loss, count, {"ratio": torch.tensor(1.0 if model.training else float("nan"))}


def inf_once(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Classification; the metric is infinite in the first evaluation, and 0.5 later."""
    loss, count, _ = classification(model, batch)
    if not hasattr(model, "evaluated") and not model.training:
        model.evaluated = True
        return loss, count, {"ratio": torch.tensor(float("inf"))}
    return loss, count, {"ratio": torch.tensor(0.5 * count)}
