"""Notices a loss of the user's own that computes all logits where `memory.loss_chunk` would not."""

import contextlib
from typing import Any

from torch import nn

from trainapp.config.schema import Config
from trainapp.errors import UserError
from trainapp.losses import losses
from trainapp.models.inspect import last_layer
from trainapp.techniques import chunked_loss
from trainapp.train.run import Run


class LogitsWatch(contextlib.AbstractContextManager["LogitsWatch"]):
    """Around traced steps: whether the last layer was called, as `linear_cross_entropy` never does. Changes nothing."""

    def __init__(self, run: Run):
        self._head = None if losses.is_built_in(run.task) else _wide_head(run.config, run.state.model)
        self._calls = 0

    def __enter__(self) -> "LogitsWatch":
        self._handle = None if self._head is None else self._head.register_forward_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _count(self, *_: Any) -> None:
        self._calls += 1

    def notes(self) -> tuple[str, ...]:
        """For plan.json."""
        if self._head is None or not self._calls:
            return ()
        return (
            f"the loss is the task's own and has all logits in memory, {self._head.out_features} per prediction: "
            "trainapp.tasks.linear_cross_entropy in it would do what memory.loss_chunk does for built-in losses",
        )


def _wide_head(config: Config, model: nn.Module) -> nn.Linear | None:
    """The model's last layer, if the loss in chunks could take it over and would save memory."""
    try:
        chunked_loss.require_head(config, model)
    except UserError:
        return None
    parts = last_layer(model)
    head = None if parts is None else parts.head
    return head if isinstance(head, nn.Linear) and head.out_features > head.in_features else None
