"""nn.Bilinear, whose rounding under autocast depends on whether memory is measured."""

import logging

import torch

from trainapp.checkpoint.train_state import TrainState
from trainapp.models.inspect import bilinear_modules
from trainapp.units import listed

log = logging.getLogger(__name__)


def warn_of_bilinear(state: TrainState) -> None:
    """Under autocast on the CPU, torch computes nn.Bilinear in fp32 while a dispatch mode counts live tensors."""
    names = bilinear_modules_with_two_roundings(state)
    if names:
        log.warning(
            "precision=%s: on the CPU, torch computes nn.Bilinear (%s) in fp32 while memory is measured, else in %s; a "
            "run and its replay may differ by this rounding. precision=fp32 excludes that",
            state.precision.mode,
            listed(names),
            state.precision.mode,
        )


def bilinear_modules_with_two_roundings(state: TrainState) -> list[str]:
    """The nn.Bilinear whose result depends on whether live tensors are counted; see `warn_of_bilinear`."""
    has_two = state.device.type == "cpu" and state.precision.compute_dtype != torch.float32
    return bilinear_modules(state.model) if has_two else []
