"""How long the Python of activation checkpointing takes: hooks, the state of blocks, the choice of what to keep.

Measured on a small network, with and without it. In a step of a small ResNet it was a tenth of the time.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import nn

from trainapp.config.schema import ActivationCheckpointing
from trainapp.planning.operation_times import Clock, Dispatched
from trainapp.techniques import checkpointing

_SHORT, _LONG = 2, 12  # layers of a block
_BLOCKS, _WIDTH = 2, 8
_PATIENCE = 0.1  # seconds for each of four networks


class Delay(NamedTuple):
    """Seconds beyond those of the operations: per checkpointed block, and per operation in it, in the forward or the
    recomputation.
    """

    block: float
    operation: float


def delay(clock: Clock, selective: bool) -> Delay:
    """The delay where the caches hold little else. selective: include the decision about each result."""
    (short, few), (long, many) = (
        _beyond_operations(clock, layers, "selective" if selective else "full") for layers in (_SHORT, _LONG)
    )
    each = max(long - short, 0.0) / (many - few)
    return Delay(max(short - few * each, 0.0) / _BLOCKS, each)


def _beyond_operations(clock: Clock, layers: int, mode: Literal["full", "selective"]) -> tuple[float, int]:
    """Seconds by which checkpointing delays a step of blocks of so many layers, less those of the operations that it
    repeats; and how many are in checkpointed blocks.
    """
    steps = [_step(clock, layers, chosen) for chosen in ("none", mode)]
    counted = []
    for step in steps:
        with Dispatched() as dispatched:
            step()
        counted.append(dispatched)
    plain, checkpointed = (clock.best(step, _PATIENCE) for step in steps)
    return max(checkpointed - plain * counted[1].all / counted[0].all, 0.0), counted[1].in_blocks


def _step(clock: Clock, layers: int, mode: Literal["none", "full", "selective"]) -> Callable[[], None]:
    """A step of two blocks, which has been taken once."""
    made = [nn.Sequential(*(_layer() for _ in range(layers))) for _ in range(_BLOCKS)]
    model = _Blocks(*made).to(clock.device)
    checkpointing.apply(model, ActivationCheckpointing(mode=mode))
    inputs = torch.randn(4, _WIDTH, device=clock.device, requires_grad=True)

    def step() -> None:
        model(inputs).sum().backward()

    step()
    return step


class _Blocks(nn.Sequential):
    def blocks(self) -> list[nn.Module]:
        """What is checkpointed."""
        return [*self]


def _layer() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.SiLU())
