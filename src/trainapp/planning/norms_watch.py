"""Notices BatchNorm that gets one value per sample and channel: it cannot train on a single sample."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainapp.torch_private import BatchNorm


class NormsWatch:
    """smallest: the fewest samples on which the model can train, as far as its BatchNorm tells."""

    def __init__(self) -> None:
        self.smallest = 1

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """While the model is called."""
        norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
        hooks = [norm.register_forward_pre_hook(self._note) for norm in norms]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        if norm.training and inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim > 1:
            samples, channels = inputs[0].shape[:2]
            if inputs[0].numel() == samples * channels:
                self.smallest = 2
