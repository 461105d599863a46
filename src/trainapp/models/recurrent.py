"""torch's recurrent layers with dropout between their layers, which on CUDA run without cuDNN."""

from typing import Any

import torch
from torch import nn


def layers_with_dropout(model: nn.Module) -> dict[str, nn.RNNBase]:
    """Return the recurrent layers that drop values between their layers, by name."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
            layers[name] = module
    return layers


def train_without_cudnn(model: nn.Module) -> None:
    """Let recurrent layers with dropout train by torch's own kernels.

    cuDNN keeps the state of its dropout from call to call, and no seed resets it (pytorch#74177, #104697): a retry or a
    resume would draw another mask. torch's kernels draw it as any other dropout, and are slower.
    """
    for layer in layers_with_dropout(model).values():
        switch = _Switch()
        layer.register_forward_pre_hook(switch.turn_off)
        layer.register_forward_hook(switch.turn_back, always_call=True)  # after an error, too


class _Switch:
    """cuDNN's switch around the forward of one layer in training mode."""

    def __init__(self) -> None:
        self._was_enabled: bool | None = None  # None: it was not touched

    def turn_off(self, layer: nn.Module, arguments: Any) -> None:
        if layer.training:
            self._was_enabled = torch.backends.cudnn.enabled
            torch.backends.cudnn.enabled = False

    def turn_back(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        if self._was_enabled is not None:
            torch.backends.cudnn.enabled = self._was_enabled
            self._was_enabled = None
